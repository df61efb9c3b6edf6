"""Training, Measured: the helpers that the chapters import.

The modules, lowest first. A module imports only modules listed above it or to its left;
`lessons` and `views` don't import each other, and besides them only notebooks and tests
import them. `tests/test_layers.py` reads this list.

    checks units facts doctor       refusals; bytes, FLOPs, seconds; typed records; versions
    models datasets landscapes      what is trained
    autograd graph replay           a small engine; what was recorded; its passes, step by step
    optimizers schedules precision  rules and state; rates by update number; formats, loss scaling
    compute fake_tensors            FLOPs; the bytes that shapes alone tell
    live_bytes                      every storage while it lives
    training memory_trace           the step; the step, measured
    shapes ledgers memory           by arithmetic: kept bytes; copies of a parameter; and live
    passes moments                  what is alive in forward and backward; the peak
    check                           predictions and exercises: the engine, pure logic
    lessons views                   questions and feedback; pictures
"""

from course_lib.doctor import doctor

__all__ = ["doctor"]
