"""The heads of long sequences poured over the attention that whole sequences leave free, and tokens after them."""

import numpy as np
from jaxtyping import Int

from solver._compiled import compiled

_ALIGN = 8  # queries to which a head is cut


@compiled
def deal_heads(
    pairs_of_head: Int[np.ndarray, " k"], num_heads: Int[np.ndarray, " k"], room: Int[np.ndarray, " devices"]
) -> Int[np.ndarray, "k devices"]:
    """Heads of each sequence to devices, about as many as their room for attention takes.

    Devices are filled one after another, so sequences lie on as few as can be, and a device that is left half full is
    gone on with.

    Args:
        pairs_of_head: query-key pairs of a head of each sequence, in the order to deal them.
        num_heads: heads to deal of each.
        room: query-key pairs each device is to get, over all heads; may be negative.

    Returns:
        Number of heads of each sequence on each device.
    """
    left = room.copy()
    num_devices = len(room)
    heads = np.zeros((len(num_heads), num_devices), np.int64)
    half_full = -1
    for k in range(len(num_heads)):
        pairs = pairs_of_head[k]
        rest = num_heads[k]
        used = np.zeros(num_devices, np.bool_)
        while rest > 0:
            q = -1
            if half_full >= 0 and not used[half_full]:
                q = half_full
            else:
                # The device that holds all the rest with the least left over, or else the emptiest.
                for d in range(num_devices):
                    if not used[d] and left[d] + pairs // 2 >= rest * pairs and (q < 0 or left[d] < left[q]):
                        q = d
                if q < 0:
                    for d in range(num_devices):
                        if not used[d] and (q < 0 or left[d] > left[q]):
                            q = d
            given = np.int64(0)
            if q >= 0:
                given = min(rest, (max(left[q], 0) + pairs // 2) // pairs)
                used[q] = True
            if given == 0:  # no device has room for half a head
                q = int(np.argmax(left))
                given = np.int64(1)
            heads[k, q] += given
            rest -= given
            left[q] -= given * pairs
            half_full = q if left[q] > pairs // 2 else -1
    return heads


@compiled
def transfers(
    lengths: Int[np.ndarray, " k"],
    held: Int[np.ndarray, "k devices"],
    excess: Int[np.ndarray, " devices"],
    over: int,
    under: int,
) -> Int[np.ndarray, "moves 4"]:
    """Attention to take from devices with too much to those with too little, at the least rows.

    A head whose queries are divided has its keys on both devices: what moves costs as many rows as heads it touches,
    so a small amount is cheapest from a short sequence and a large one from a long one.

    Args:
        lengths: of the sequences.
        held: queries of each sequence on each device, counted over all heads.
        excess: query-key pairs by which each device is off.
        over, under: pairs by which a device may stay above and below.

    Returns:
        Rows (sequence, from, to, queries), queries counted over all heads: one and a half heads are 1.5 times the
        length. Those of one sequence and source follow each other.
    """
    left = excess.copy()
    num, num_devices = held.shape
    out = np.zeros((4 * num_devices + 4, 4), np.int64)
    count = 0
    taken = np.zeros((num, num_devices), np.int64)  # queries gone
    while count < len(out):
        p, q = np.argmax(left), np.argmin(left)
        if left[p] <= over and -left[q] <= under:
            break
        amount = min(left[p], -left[q])
        if left[p] <= over:  # nobody has much to give: only as much as must be
            amount = -left[q] - under
        elif -left[q] <= under:
            amount = left[p] - over
        best, best_cost, best_queries = -1, np.int64(0), np.int64(0)
        for i in range(num):
            length = lengths[i]
            if held[i, p] == taken[i, p]:
                continue
            queries = min((amount + length // 2) // length, held[i, p] - taken[i, p])
            if queries > length // 2 * 2 and queries % length * length <= over:
                queries -= queries % length
            if queries <= 0 or 2 * queries * length < amount:
                continue
            if queries > _ALIGN and queries % length:
                queries -= queries % length % _ALIGN
            touched = (taken[i, p] + queries + length - 1) // length - taken[i, p] // length
            cost = touched * length
            if best < 0 or cost < best_cost:
                best, best_cost, best_queries = i, cost, queries
        if best < 0:
            break
        out[count, 0], out[count, 1], out[count, 2], out[count, 3] = best, p, q, best_queries
        count += 1
        taken[best, p] += best_queries
        left[p] -= best_queries * lengths[best]
        left[q] += best_queries * lengths[best]
    return out[:count]


@compiled
def spread(
    supply: Int[np.ndarray, " k"], profit: Int[np.ndarray, "k devices"], capacity: Int[np.ndarray, " devices"]
) -> Int[np.ndarray, "k devices"]:
    """Tokens of sequences on devices, at most `capacity` on each, at the largest sum of `profit` per token.

    A transportation problem, solved exactly: all tokens where they profit most, then what is too much on a device goes
    along cheapest paths of exchanges to devices with room (successive shortest paths).

    Args:
        supply: tokens of each sequence.
        profit: of a token of each sequence on each device.
        capacity: tokens each device may hold; together at least the supply.

    Returns:
        Tokens of each sequence on each device.
    """
    k, n = profit.shape
    far = np.int64(1) << 60
    tokens = np.zeros((k, n), np.int64)
    load = np.zeros(n, np.int64)
    for i in range(k):
        rest = supply[i]
        best = profit[i].max()
        for q in range(n):
            if profit[i, q] == best:
                given = min(rest, max(capacity[q] - load[q], 0))
                tokens[i, q] += given
                load[q] += given
                rest -= given
        if rest > 0:
            q = int(np.argmax(profit[i]))
            tokens[i, q] += rest
            load[q] += rest
    loss = np.zeros((n, n), np.int64)
    mover = np.zeros((n, n), np.int64)
    stale = np.ones(n, np.bool_)
    while np.any(load > capacity):
        for p in range(n):
            if not stale[p]:
                continue
            stale[p] = False
            loss[p] = far
            for i in range(k):
                if tokens[i, p] > 0:
                    for q in range(n):
                        if profit[i, p] - profit[i, q] < loss[p, q]:
                            loss[p, q] = profit[i, p] - profit[i, q]
                            mover[p, q] = i
        distance = np.where(load > capacity, np.int64(0), far)
        before = np.full(n, -1, np.int64)
        for _ in range(n):
            changed = False
            for p in range(n):
                if distance[p] == far:
                    continue
                for q in range(n):
                    if loss[p, q] < far and q != p and distance[p] + loss[p, q] < distance[q]:
                        distance[q] = distance[p] + loss[p, q]
                        before[q] = p
                        changed = True
            if not changed:
                break
        target = -1
        for q in range(n):
            if load[q] < capacity[q] and distance[q] < far and (target < 0 or distance[q] < distance[target]):
                target = q
        if target < 0:
            break
        amount = capacity[target] - load[target]
        q = target
        while before[q] >= 0:
            p = before[q]
            amount = min(amount, tokens[mover[p, q], p])
            q = p
        amount = min(amount, load[q] - capacity[q])
        load[q] -= amount
        load[target] += amount
        q = target
        while before[q] >= 0:
            p = before[q]
            tokens[mover[p, q], p] -= amount
            tokens[mover[p, q], q] += amount
            stale[p] = True
            stale[q] = True
            q = p
    return tokens
