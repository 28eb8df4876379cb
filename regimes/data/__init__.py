"""What is trained on: images, texts, deficits, and the protocol of a task."""
