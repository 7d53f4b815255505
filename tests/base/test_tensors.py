"""A call with other tensors in its arguments: what is put into the copies is in the caller's afterwards."""

from __future__ import annotations

from typing import Any

import torch

from safe_rope._base.tensors import arguments_mapped


def test_what_is_put_into_lists_and_dictionaries_comes_back_as_it_was_given() -> None:
    low, other = torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
    inner: list[Any] = [1, other]
    cache: dict[str, Any] = {"low": low, "lengths": [], "inner": inner, "gone": 0}
    with arguments_mapped(torch.Tensor.float, (low, cache), {"rest": (inner,)}) as (args, kwargs):
        raised, given = args
        assert raised.dtype == given["low"].dtype == torch.float32
        given["lengths"].append(3)
        given["new"] = given["inner"][1]
        given["inner"].append(raised)
        del given["gone"]
        assert len(kwargs["rest"]) == 1
    assert list(cache) == ["low", "lengths", "inner", "new"]
    assert cache["low"] is low
    assert cache["lengths"] == [3]
    assert cache["new"] is other
    assert cache["inner"] is inner
    assert inner[:2] == [1, other]
    assert inner[2] is low


def test_what_is_only_read_is_left_alone() -> None:
    class Refuses(dict[str, Any]):
        def clear(self) -> None:
            raise AssertionError("it was written to")

    given = Refuses(low=torch.ones(1, dtype=torch.bfloat16))
    with arguments_mapped(torch.Tensor.float, ([given],), {}) as (args, _):
        assert args[0][0] is not None
    assert given["low"].dtype == torch.bfloat16
