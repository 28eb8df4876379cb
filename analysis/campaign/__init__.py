"""The campaign: trains every grid behind figures, tables and findings."""
