"""Notebooks: tables and figures as the output of cells, and an explorer."""

from .outputs import agreement, compared, frame, png, reasons, show

__all__ = ["agreement", "compared", "frame", "png", "reasons", "show"]
