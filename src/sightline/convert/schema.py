"""Which tables there are: the schema people write queries against."""

from __future__ import annotations

from typing import Final

from sightline.convert import model_tables as model
from sightline.convert import run_tables as run

#: Every table by its name, in the order they are listed.
TABLES: Final = {
    table.name: table
    for table in (
        run.OPS, run.CALLS, model.MODULES, model.PARAMETERS, run.VALUES, run.INPUTS, run.OUTPUTS,
        run.CALL_INPUTS, run.CALL_OUTPUTS, run.EDGES, run.DEVICE_WORK, model.STORAGES, model.STATS,
        model.STEPS, model.FRAMES, model.TENSORS, model.INFO,
    )
}  # fmt: skip
#: Other names for the same tables. VALUES is a word of SQL: it needs quotes there.
ALIASES: Final = {"calls": "module_calls", "vals": "values"}
