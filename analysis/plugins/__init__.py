"""What the study adds to the toolkit, by names of classes: compressors, policies, detectors and
instruments that only it compares.

Only this part of the study runs during training and exchanges tensors between processes.
"""
