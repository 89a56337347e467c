"""Torus attention inside its custom gradient: what is pulled and pushed between machines, and what hides it.

N machines of R devices. A device starts with its part of the sequence, all heads; machine t shall compute the t-th of N
parts of the heads, and in it keys rotate among the R devices. With o_k = (t + k) mod N, everything of a machine's own
(k = 0) stays, the rest moves once:

    Pull Q,  k = 0 .. N-1   queries of o_{k+1} arrive (at last the keys of o_1)   | queries of o_k to own keys
    Pull KV, k = 1 .. N-1   keys of o_{k+1} arrive                                | all queries to the keys of o_k,
                                                                                  | at the last k all but its own
    Push O                  outputs go to the machines they are of                | own queries to the keys of o_{N-1}

A device trades with those of the same place on other machines only. One transfer between machines is in flight at a
time, since that is what a GPU's scheduler hides: a pull is one permute, the push is one exchange. Ulysses inside a
machine is around all this: its exchange works on another axis than pulls and pushes, so it can be done for all parts
before the first pull, and after the last push, instead of for each part when it arrives.

For the gradient queries and keys are kept as they were pulled. A pair of parts at a time gives transfers the most to
hide under:

    Pull dO, k = 0          cotangents of o_1 arrive                              | own queries and the keys of others
             k = 1 .. N-2   cotangents of o_{k+1} arrive, dQ of o_{k-1} leave     | queries of o_k and all keys
    Push dKV, k = N-1       dQ of o_{k-1}, then dKV of o_1, o_2, .. leave         | queries of o_k and keys of o_1, ..,
                                                                                  | o_{N-1}, then own
    Push dQ                 dQ of o_{N-1} leave                                   | own queries and own keys

That is N^2 turns of an inner ring. Where there is one (and N > 2, and no causal mask that spares whole pairs), queries
share its turns, and 2 N + 1 are enough:

    Pull dO, k = 0          cotangents of o_1 arrive                       | own queries and the keys of o_1
             k = 1 .. N-2   cotangents of o_{k+1} arrive                   | queries of o_k and own keys
                            (nothing)                                      | queries of o_{N-1} and own keys, then
                                                                           | others' queries and the keys of o_1
    Push dKV, k = 2 .. N-1  dKV of o_{k-1} leave                           | all queries and the keys of o_k, at
                                                                           | the last k all but its own
    Push dQ                 dQ of all others leave, in one exchange        | own queries and the keys of o_{N-1}
    Push dKV                dKV of o_{N-1} leave                           | own queries and own keys

One machine of R devices is ring attention: it is computed here too.

Reference: SwiftFusion (arXiv 2601.20273), where each pulled part goes through the exchange of its
machine on arrival.
"""

from functools import partial

import jax

from parallel._block_attention import once_differentiable
from parallel._torus_backward import torus_backward
from parallel._torus_forward import torus_forward
from parallel._torus_parts import Ids, Outputs, Rows, Saved, Torus


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_torus(torus: Torus, rows: Rows, ids: Ids) -> Outputs:
    """Attention of all queries to all keys and the text, by the schedule above; outputs in the queries' dtype.

    Per device. The gradient of the text's rows is this device's share; that of its output is the sum over the ring.
    """
    return torus_forward(torus, rows, ids)[0]


def _fwd(torus: Torus, rows: Rows, ids: Ids):
    return torus_forward(torus, rows, ids)


def _bwd(torus: Torus, saved: Saved, cotangent: Outputs):
    return once_differentiable(partial(torus_backward, torus))(saved, cotangent), None


attend_torus.defvjp(_fwd, _bwd)
