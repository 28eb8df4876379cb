"""Findings: every claim with its effect, interval and verdict, and the pages of docs/findings/.

::

    regimes figure claims data/reference  # the claims alone, for any records
    make pages                            # or: python -m analysis.findings
    python -m analysis.findings --again   # compute every number again, about two minutes

`claims` judges the sentences of `sentences`: each is an effect (`effects`); its interval gives a
verdict (`verdicts`). `provenance` lists the code behind the records. The pages are made so:

1. `numbers` holds functions of the committed records, such as ``effect("small", "low", "high")``.
2. A template (``templates/*.md.jinja``) calls them by name where a sentence states the result, and
   says next to the sentence what has to hold for it: ``{{ effect(...) | above | ci(2) }}`` fails
   where the interval does not lie above zero (`checks`).
3. Results are kept in ``docs/findings/numbers.json`` with a digest of each archive they come from.
   A number is computed again when one of its archives has changed, so that most edits of a text
   take a second (`store`).
4. The pages are plain Markdown, in ``docs/findings.md`` and ``docs/findings/``. They are committed.
"""
