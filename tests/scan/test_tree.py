"""What may be made of a value, by the names that hold it: most operations are spared a question."""

import ast

import pytest

from safe_rope.scan.engine.tree import Tree
from safe_rope.scan.engine.walk import Walk

METHODS = "class C:\n    def f(self):\n        {}\n    def g(self):\n        end({})"


def reaches(source: str) -> bool:
    """Say whether what ``seed()`` gives may be in what ``end`` is given."""
    walk = Walk(ast.parse(source))
    called = {
        getattr(site.node.func, "id", ""): id(site.node)
        for site in walk.sites
        if isinstance(site.node, ast.Call)
    }
    return called["end"] in Tree(walk).made_of([called["seed"]])


@pytest.mark.parametrize(
    "source",
    [
        "end(seed() + 1)",
        "a = seed()\nb = [a]\nend(b)",
        "a = 1\na += seed()\nend(a)",
        "(a := seed())\nend(a)",
        "a, *b = seed()\nend(b)",
        "some = []\nsome.append(seed())\nend(some)",
        "some = {}\nsome['a'] = seed()\nend(**some)",
        "for a in seed():\n    end(a)",
        "end([a for a in seed()])",
        "def f():\n    return seed()\nend(f())",
        "def f(a):\n    end(a)\nf(seed())",
        "def f(*, a):\n    end(a)\nf(a=seed())",
        "def f(a=seed()):\n    end(a)",
        "def f(a):\n    end(a)\ng = partial(f, seed())",
        "def f():\n    global a\n    a = seed()\ndef g():\n    end(a)",
        "class C:\n    a = seed()\n    def f(self):\n        end(self.a)",
        "class C:\n    def __init__(self, a):\n        end(a)\nC(seed())",
        METHODS.format("self.a = seed()", "self.a"),
        METHODS.format("self.register_buffer('a', seed())", "self.a"),
        METHODS.format("self.a = seed()", "getattr(self, 'a')"),
        "def f(a: (b := 1)):\n    pass\na = seed()\nend(a)",
    ],
)
def test_what_holds_a_value_is_followed(source: str) -> None:
    assert reaches(source)


@pytest.mark.parametrize(
    "source",
    [
        "a = seed()\nend(b)",
        "def f():\n    a = seed()\ndef g(a):\n    end(a)",
        "def f(a):\n    pass\ndef g(a):\n    end(a)\nf(seed())",
    ],
)
def test_variables_of_one_name_in_two_functions_are_two(source: str) -> None:
    assert not reaches(source)
