"""What the study adds to the toolkit, by names of classes: compressors, policies, detectors and
instruments that only it compares, a task, its model and deficit.

Only this part of the study runs during training and exchanges tensors between processes.
"""
