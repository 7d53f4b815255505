"""The work behind ``safe-rope audit`` and ``safe-rope compare``: one measuring process for each load path."""
