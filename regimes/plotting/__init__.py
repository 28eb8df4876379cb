"""Records as numbers and pictures: what `regimes report` and the study (`analysis`) draw alike.

- `groups`, `curves`, `schedules`: runs by schedule and seed, their curves, the table of schedules;
  `decays`: where their learning rates fall.
- `looks`, `metrics`: how a schedule is drawn and called, how what was measured is written.
- `style`: the theme, what every caption says, how a figure is saved.
- `panels`, `levels`, `bands`: one panel of curves, the map of levels, the bands of detectors.

The last two lines import seaborn and matplotlib, so the command line imports them late. No torch.
"""
