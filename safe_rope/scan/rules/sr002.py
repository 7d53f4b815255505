"""A count that `torch.arange` makes in the dtype of something else.

`dtype=x.dtype` follows an activation, a buffer or a parameter, and a dtype parameter follows the caller.
In bfloat16 training all of them are bfloat16, where whole numbers end at 256: positions 256 and 257 become
the same one. Here forward is no safer than a constructor.

Count in int64 and compute in float32; cast the finished table, if anything, to the activation's dtype. The
fix changes the dtype of the result and is therefore never applied without `--unsafe-fixes`.

Not reported: a dtype that is an integer one by what its tensor is called or used for, as an index say.
"""

from __future__ import annotations

from safe_rope.scan.engine import LOW, PINNED, Call, File, Report, Site, indices
from safe_rope.scan.fixing import fixes
from safe_rope.scan.rules.rule import Rule
from safe_rope.scan.rules.sr001 import called, effect, is_anothers


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report an arange whose dtype is another tensor's, the caller's or the default."""
    call = file.counted(call)
    if call is None or (given := call.keywords.get("dtype")) is None:
        return None
    dtype = file.value(given.value, given.place)
    if dtype.sort == "none" or dtype.is_int or dtype.dtype == "complex":
        return None
    if dtype.dtype in PINNED | LOW and not is_anothers(dtype):
        return None
    if file.is_harmless(site, call) or indices.counts_in(file, site, given):
        return None
    fix = fixes.through_integers(file, call, site.place, keep=False)
    source = dtype.source or file.source.segment(given.value) if given.direct else dtype.source
    return Report(
        call.node,
        file.severity(
            "error" if dtype.dtype else "note", site, follows_activations=dtype.dtype not in PINNED
        ),
        f"{called(call)} in the dtype of {source or 'something else'}: {effect(file, site, call, 'bfloat16')}"
        "; count in int64, compute in float32",
        fix,
    )


RULE = Rule(
    id="SR002",
    name="inherited-arange",
    severity="error",
    summary="torch.arange with the dtype of another tensor, or of the caller",
    explanation=__doc__,
    functions=("arange", "tensor", "as_tensor", "new_tensor"),
    check=check,
    VALID=(
        "import torch\ndef forward(self, input_ids):\n    return torch.arange(9999, dtype=input_ids.dtype)\n",
        "import torch\ndef f(lengths):\n    n = lengths.long()\n"
        "    return torch.arange(n.max(), dtype=n.dtype)\n",
        "import torch\ndef f(position_ids_rmpad, n):\n"
        "    return torch.arange(n, dtype=position_ids_rmpad.dtype)\n",
        "import torch\ndef f(input_pos, n):\n"
        "    return input_pos[-1] + torch.arange(n, dtype=input_pos.dtype)\n",
        "import torch\nt = torch.arange(len(x), dtype=None)\n",
        "import torch\ndef f(lengths):\n    return lengths.new_tensor(range(9999))\n",
        "import torch\ndef f(x: torch.LongTensor):\n    return torch.arange(9999, dtype=x.dtype)\n",
        "import torch\ndef f(x):\n    return torch.arange(100, dtype=x.dtype)\n",
        "import torch\ndef inverse(p):\n    q = torch.empty_like(p)\n"
        "    q[p] = torch.arange(p.numel(), dtype=p.dtype)\n    return q\n",
        "import torch\ndef f(x, rows, n):\n    offsets = torch.arange(n, dtype=rows.dtype)\n"
        "    return x[rows[:, None] * n + offsets]\n",
        "from torch import *\nx = arange(n, dtype=int64)\n",
        "import torch\ndef f(x, mid, rows):\n    ids = torch.arange(9, dtype=mid.dtype).repeat(rows)\n"
        "    return x[ids], torch.arange(len(x), dtype=mid.dtype)\n",
        "import torch\nt = torch.arange(n, dtype=int)\n",
        "import torch\ndef f(slot, n):\n    page = slot // n\n"
        "    return page, torch.arange(n, dtype=slot.dtype)\n",
    ),
    INVALID=(
        "import torch\ndef forward(self, x):\n    return torch.arange(x.shape[1], dtype=x.dtype)\n",
        "import torch\ndef f(self):\n    return torch.arange(self.n, dtype=self.inv_freq.dtype)\n",
        "import torch\ndef f(x, n):\n    dtype, device = x.dtype, x.device\n"
        "    return torch.arange(n, dtype=dtype)\n",
        "import torch\ndef table(n, dtype):\n    return torch.arange(n, dtype=dtype)\n",
        "import torch\nt = torch.arange(n, dtype=torch.get_default_dtype())\n",
        "import torch\ndef forward(self, x):\n    return x.new_tensor(range(x.shape[1]))\n",
        "import torch\ndef f(x, n):\n    return torch.as_tensor(list(range(n)), dtype=x.dtype)\n",
    ),
)
