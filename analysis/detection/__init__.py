"""Detection: which epochs each statistic marks, how far detectors agree, what they miss."""
