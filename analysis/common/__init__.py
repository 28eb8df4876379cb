"""What several rooms use: commands and their files, comparisons of schedules, panels, verdicts."""
