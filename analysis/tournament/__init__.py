"""Tournament: schedules against controls that send as many floats."""
