"""The hook for trainers that wrap the model themselves: Hugging Face's, Accelerate, Lightning.

This room uses hook; nothing imports it but the user.

Each module needs the package it is for and is imported by its own name, before that package::

    from regimes.integrations.transformers import RegimesCallback
    from regimes.integrations.accelerate import attach
    from regimes.integrations.lightning import RegimesCallback

They import torchvision where it is installed, which a torch that it was not built for refuses.
"""

from regimes.data.sources import torchvision_datasets

torchvision_datasets()
