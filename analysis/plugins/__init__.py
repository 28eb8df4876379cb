"""What the study adds to the toolkit, by entry points: instruments, a task, its model and deficit.

Only this part of the study runs during training and exchanges tensors between processes.
"""
