"""What every room may use and what uses none of them: configuration, output for the terminal,
errors, checks of input, seeds, number formats and intervals."""
