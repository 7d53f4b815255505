"""Values by identity: equal keys are apart, unhashable ones are taken, and an entry goes with its key."""

import gc
import threading

from safe_rope._base.by_identity import ByIdentity


class _Same:
    """Equal to all of its kind, and without a hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same)


def test_equal_keys_that_have_no_hash_are_apart() -> None:
    first, second = _Same(), _Same()
    found = ByIdentity[_Same, int]()
    found[first] = 1
    assert second not in found
    assert found.get(second) is None
    found[second] = 2
    found[first] = 3
    assert (found[first], found[second], len(found)) == (3, 2, 2)
    assert [id(key) for key in found] == [id(first), id(second)]
    assert found.pop(first) == 3
    assert found.pop(first, 4) == 4
    assert first not in found
    assert second in found


def test_an_entry_goes_with_its_key_and_another_in_its_place_stays() -> None:
    found = ByIdentity[_Same, int]()
    for turn in range(100):  # a new object often gets the number of the one that has just gone
        key = _Same()
        assert key not in found
        found[key] = turn
        assert found[key] == turn
        del key
    assert len(found) == 0
    kept = _Same()
    found[kept] = 1
    found[_Same()] = 2
    gc.collect()
    assert list(found) == [kept]
    found.clear()
    assert not found
    del kept
    gc.collect()


def test_a_key_that_goes_after_it_was_taken_out_and_put_back_takes_its_last_entry() -> None:
    found = ByIdentity[_Same, int]()
    key = _Same()
    found[key] = 1
    del found[key]
    found[key] = 2
    assert found[key] == 2
    del key
    gc.collect()
    assert len(found) == 0


def test_other_threads_may_add_while_one_iterates() -> None:
    found = ByIdentity[_Same, int]()
    keys = [_Same() for _ in range(2000)]
    for key in keys[:1000]:
        found[key] = 0

    def add() -> None:
        for key in keys[1000:]:
            found[key] = 1

    adding = threading.Thread(target=add)
    adding.start()
    while adding.is_alive():
        assert len(list(found)) >= 1000
    adding.join()
    assert len(list(found)) == 2000
