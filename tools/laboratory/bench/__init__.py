"""Measure speed, bytes and distance, this library beside others in one run.

A comparison of times says for each row what is asked of it; the exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

LIMIT = 3600.0
SECTIONS = {
    "tables": "a lookup of exact tables, and the installed transformers' rotary forward",
    "application": "the rotation of q and k, by transformers and whatever else is installed",
    "training": "a whole training step of a small Llama, with the guard and without",
    "loading": "from_pretrained of a 24-layer model, with the guard and without",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, text in {"rope": "the four that follow, in one run", **SECTIONS}.items():
        section = kinds.add_parser(name, help=text, description=text, allow_abbrev=False)
        section.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
        section.add_argument("--threads", type=int, default=1, help="for torch on CPU (default: %(default)s)")
        section.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
        if name in ("rope", "application"):
            section.add_argument(
                "--shape", metavar="TEXT", default="", help="only the application's shapes that end so"
            )
    text = "which other libraries' rotations can be measured here, and why not"
    others = kinds.add_parser("others", help=text, description=text, allow_abbrev=False)
    others.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    text = "decoding, prefill and training with the guard and without, a model for every body that rotates"
    decoding = kinds.add_parser("decode", help=text, description=text, allow_abbrev=False)
    decoding.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    decoding.add_argument("--threads", type=int, default=1, help="for torch on CPU (default: %(default)s)")
    decoding.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    for name, of in (("again", "a second run"), ("compiled", "of compiled models")):
        decoding.add_argument(
            f"--{name}",
            action="store_const",
            const=name,
            dest="add",
            help=f"add to the file of --json, as {of}",
        )
    decoding.add_argument("--page", action="store_true", help="run nothing; print the page of the record")
    decoding.add_argument("--only", metavar="NAMES", help="comma-separated model types")
    decoding.add_argument("--batches", default="1,16", help="sequences at a time (default: %(default)s)")
    decoding.add_argument("--layers", type=int, default=8, help="where a model can have them (default: 8)")
    decoding.add_argument(
        "--width",
        choices=["small", "own"],
        default="small",
        help="of the layers: small ones, or as in the default config of the model (default: %(default)s)",
    )
    decoding.add_argument("--rounds", type=int, default=60, help="of each kind (default: %(default)s)")
    decoding.add_argument(
        "--cases",
        default="decode",
        help="comma-separated: decode, static, compiled, graphed, prefill, training (default: %(default)s)",
    )
    text = "torch.autocast on two ranks: how far from DDP, what travels and waits in which dtype"
    autocast = kinds.add_parser("autocast", help=text, description=text, allow_abbrev=False)
    autocast.add_argument(
        "--format", choices=["text", "json"], default="text", help="tables, or one JSON object"
    )
    autocast.add_argument(
        "--parity",
        choices=["none", "covering", "grid"],
        default="covering",
        help="which combinations of stage, accumulation, clipping and buffers to compare with DDP; the grid "
        "takes about half an hour (default: %(default)s)",
    )


def main(options: argparse.Namespace) -> int:
    if options.what == "autocast":
        from laboratory.bench import autocast

        return autocast.run(options)
    if options.what == "decode":
        from laboratory.bench import decode

        return decode.run(options)
    if options.what == "others":
        from laboratory.bench.others import availability

        print(*(f"{name}: {state}" for name, state in availability(options.device).items()), sep="\n")
        return 0
    from laboratory.bench import rope

    return rope.run(tuple(SECTIONS) if options.what == "rope" else (options.what,), options)
