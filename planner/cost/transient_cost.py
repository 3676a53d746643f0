"""Bytes that fully_shard holds only during a layer's turn: for one shape, or for tables of shapes at once."""

from dataclasses import dataclass
from typing import Generic

from .elementwise import Flag, Values, choose, most


@dataclass(frozen=True)
class Working(Generic[Values]):
    """Bytes of activations during a layer's turn, beyond those that it keeps: in its forward and in its backward.
    passed: bytes that the backward has freed when it ends. logits: bytes of logits, 0 if the layer does not compute the
    loss."""

    forward: Values
    backward: Values
    passed: Values
    logits: float


@dataclass(frozen=True)
class Turn(Generic[Values]):
    """Bytes of parameters and gradients during a layer's turn under fully_shard. copy: its gathered parameters;
    fetched: those of the layer that is gathered ahead of it; new: its gradients in compute dtype; whole: its gradients
    in fp32, until they are reduced to `sharded_over` ranks. resharded: it gives its gathered parameters back after the
    forward; copies_stay: what stays gathered does so until the last micro-batch; in_root: it is in fully_shard's root.
    frozen: bytes of gathered parameters without gradients, of this layer and of the one gathered ahead."""

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
    """Largest bytes that are there only during a layer's turn. transient: in its forward and backward. ending: in these
    and in the reduction of its gradients, when its activations are gone. waiting: in its backward, while gradients of
    the next layer are still being reduced."""

    transient: Values
    ending: Values
    waiting: Values


def transients(working: Working[Values], turn: Turn[Values], kept: Values, returns_loss: bool) -> Transients[Values]:
    """Largest bytes of a layer's forward, of its backward, and of its reduction, with gradients in compute dtype and in
    fp32 until they are reduced. kept: bytes of its activations, which are gone by the time of the reduction. In the
    forward gathered parameters arrive in a buffer, beside the parameters that are copied out of it; until then the
    buffer of the layer before is there, too. Gradients, if there are any, take more than both."""
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
