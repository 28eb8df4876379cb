"""What several rooms use: commands and their files, comparisons, panels, names of arms."""
