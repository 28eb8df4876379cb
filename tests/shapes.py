"""The run-time checker of jaxtyping annotations in tests; an int is accepted where a float is."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
