"""Functions of the committed records that templates call, by subject: `NUMBERS`, by name."""

from ..sources import number_functions
from . import (
    authors,
    choices,
    clocks,
    compressors,
    detection,
    differences,
    ladders,
    laws,
    lost,
    moments,
    predicted,
    pulses,
    ranges,
    settings,
    tournaments,
)

NUMBERS = number_functions(
    authors,
    moments,
    differences,
    tournaments,
    ladders,
    detection,
    ranges,
    compressors,
    pulses,
    laws,
    lost,
    settings,
    choices,
    clocks,
    predicted,
)
