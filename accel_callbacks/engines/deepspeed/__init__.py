"""DeepSpeed trains the model: one engine around each model and its optimizer, ZeRO 0 to 3.

`strategy.py` is entered by `prepare`, and gives DeepSpeed its configuration. `gradients.py` has
backward and clipping, `optimizer.py` the step, `states.py` checkpoints by parameter, which
`zero_state.py` gathers out of DeepSpeed's flat vectors. `zero_agreement.py` compares what ranks
gather and reduce, and `build.py` names operators that are built. The options are in
`plugins/deepspeed.py`.

The window is the loop's: DeepSpeed is told that a step has one backward, and before each backward
whether it is the last. Under ZeRO, `parameter.grad` and `optimizer.state` are empty between calls,
and so is a parameter of stage 3: nothing outside of `zero_state.py` and `gradients.py` looks there.

No parameter is gathered on a part of the ranks, nothing replaces a method of DeepSpeed whose name
is mangled, and `deepspeed` is imported in functions alone, because that takes seconds.
"""
