"""Bytes that fully_shard has only during a layer's turn: of one shape, or of tables of shapes alike."""

from dataclasses import dataclass
from typing import Generic

from .elementwise import Flag, Values, choose, most


@dataclass(frozen=True)
class Working(Generic[Values]):
    """Bytes of activations while a layer is at work, beyond what it keeps. passed: what its backward has let go of when
    it ends. logits: 0 without a loss."""

    forward: Values
    backward: Values
    passed: Values
    logits: float


@dataclass(frozen=True)
class Turn(Generic[Values]):
    """Bytes of parameters and gradients in a layer's turn under fully_shard. copy: its gathered parameters; fetched:
    those of the layer that is fetched ahead of it; new: its gradients in compute dtype; whole: in fp32, until they are
    reduced to `sharded_over` ranks. resharded: it gives its gathered parameters back; copies_stay: what is kept
    gathered stays until the last micro-batch; in_root: the root of fully_shard has them. frozen: of the layer's copy
    and of that of the one before it, what has no gradients."""

    copy: Values
    fetched: Values
    new: Values
    whole: Values
    sharded_over: Values
    resharded: Flag
    copies_stay: Flag
    in_root: bool
    frozen: float = 0.0


@dataclass(frozen=True)
class Transients(Generic[Values]):
    """Bytes that are there only during a layer's turn: transient, of its forward and its backward; ending, of these and
    of what comes after them, when what it kept is gone and its gradients are reduced; waiting, of its backward, while
    those of the layer after it are."""

    transient: Values
    ending: Values
    waiting: Values


def transients(working: Working[Values], turn: Turn[Values], kept: Values, returns_loss: bool) -> Transients[Values]:
    """The most of a layer's forward, of its backward, and of its reduction: gradients in compute dtype, and in fp32
    until they are reduced. kept: bytes of its activations, which are gone by then. What arrives for the forward lies in
    a buffer beside the parameters that are copied out of it, and so does, until then, what came for the layer before;
    gradients take more than both, where there are any."""
    several, nothing = turn.sharded_over > 1, 0.0 * turn.copy
    own: Values = choose(turn.resharded, turn.copy, 0.0)
    again: Values = choose(turn.resharded, turn.fetched, 0.0)
    fetched: Values = choose(several, again, 0.0)
    arriving: Values = choose(turn.copies_stay, own, turn.copy)
    arrived: Values = nothing if turn.in_root else choose(several, arriving, 0.0)
    if working.logits:
        # The loss comes when the layer's parameters are given back, unless it is computed inside of the module.
        beside = most(working.forward, working.backward) + (arrived if returns_loss else nothing)
        forward = working.logits - working.passed
        backward = forward + turn.new
    else:
        beside, forward = nothing, working.forward
        backward = working.backward + most(turn.new - working.passed, 0.0)
    waiting = backward + own + fetched
    between = most(most(beside, forward + own + arrived), waiting)
    if turn.frozen and not turn.in_root:
        between = most(between, own + choose(several, turn.frozen, 0.0) - kept)
    if turn.in_root:
        return Transients(between, between, waiting)
    made: Values = choose(turn.copies_stay, 0.0, turn.new)
    scattered: Values = choose(several, turn.whole / turn.sharded_over, 0.0)
    given_back: Values = choose(turn.resharded, 0.0, turn.copy)
    after = made + turn.whole + scattered + fetched - kept - given_back
    return Transients(between, most(between, after), waiting)
