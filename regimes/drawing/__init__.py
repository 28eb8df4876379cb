"""Records as numbers and pictures: what `regimes report` and the study (`analysis`) draw alike.

- `numbers`: runs grouped by schedule and seed, and their curves. No drawing.
- `metrics`: how what was measured is written.
- `style`: how a schedule looks, the theme, what every caption says, how a figure is saved.
- `panels`, `levels`, `bands`: curves, the map of levels, the bands of detectors.

seaborn and matplotlib are imported here, so the command line imports this package late. No torch.
"""
