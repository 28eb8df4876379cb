"""Names of parts that committed records and grids have and no list offers, with their classes.

A part is named by its class, ``package.module:Class``. These names are older: a record, a grid or
a setting may go on using them. By them alone is a class of the study imported here.
"""

from __future__ import annotations

RECORDED: dict[str, dict[str, str]] = {  # by the kind of a `Registry`
    "compressor": {
        "dct-topk": "analysis.plugins.cosine:DCTTopK",
        "low-pass": "analysis.plugins.low_pass:LowPass",
        "threshold": "analysis.plugins.threshold:Threshold",
        # of when the wheel had the study under this name
        "regimes_study.plugins.scattered:ScatteredMean": "analysis.plugins.scattered:ScatteredMean",
        # of the collectives of FSDP2, which choose it by the number of bits
        "quantised-scatter": "regimes.compression.scatter:QuantisedScatter",
    },
    "policy": {
        "accordion-ladder": "analysis.plugins.ladders:AccordionLadder",
        "adacomm": "analysis.plugins.adacomm:AdaComm",
        "error-ladder": "analysis.plugins.ladders:ErrorLadder",
        "gravac": "analysis.plugins.allocation:GraVAC",
        "l-greco": "analysis.plugins.allocation:LGreCo",
    },
    "detector": {
        "fisher-change": "analysis.plugins.detectors:FisherChange",
        "msdr-fall": "analysis.plugins.detectors:MsdrFall",
        "trace-cusum": "analysis.plugins.detectors:TraceCusum",
    },
    "instrument": {
        "moments": "analysis.plugins.moments:Moments",
        "moments-frozen": "analysis.plugins.moments:FrozenMoments",
        "rivals": "analysis.plugins.rivals:Rivals",
    },
}
