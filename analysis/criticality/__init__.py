"""How much a pulse harms a run, by the unit where it starts, and which signals predict that."""
