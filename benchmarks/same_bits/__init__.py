"""Two versions of the code held against each other: do the same trainings end in the same bits?

``python -m benchmarks.same_bits`` trains the cases of this package with the code of a commit and
with the present tree, on this machine, and compares what both have recorded, the weights and the
state that they end with, the memory that they hold and the operators that a step launches.

- ``__main__``: the command. ``compare``: what is held against what.
- ``train``: all cases with the code of one tree. ``processes``: the processes of one case.
- ``case``, ``trainer``, ``hook``, ``local``, ``own``: the cases, by what trains them.
- ``attached``: how the cases call ``attach`` and ``local_steps``.
- ``states``: weights and memories under names that do not depend on how a checkpoint is laid out.
- ``meter``: operators, collectives and memory of a step.

Only public names of ``regimes`` are used, but in ``states``: the base's tree is trained with the
same files, and only ``attached`` knows the arguments of a hook.
"""
