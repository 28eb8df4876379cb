"""The pages of the findings: numbers computed from the records, put into templates.

::

    make pages                            # or: python -m analysis.findings
    python -m analysis.findings --again   # compute every number again, about two minutes

1. `NUMBERS` holds functions of the committed records, such as ``effect("small", "low", "high")``.
2. A template (``templates/*.md.jinja``) calls them by name where a sentence states the result, and
   says next to the sentence what has to hold for it: ``{{ effect(...) | above | ci(2) }}`` fails
   where the interval does not lie above zero.
3. Results are kept in ``docs/findings/numbers.json`` with a digest of each archive they come from.
   A number is computed again when one of its archives has changed, so that most edits of a text
   take a second.
4. The pages are plain Markdown, in ``docs/findings.md`` and ``docs/findings/``. They are committed.
"""

from . import compressors, detection, differences, ladders, pulses, ranges, schedules, tournaments
from .sources import number_functions

NUMBERS = number_functions(
    differences, tournaments, ladders, detection, ranges, compressors, pulses, schedules
)
