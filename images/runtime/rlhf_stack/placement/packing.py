"""Assignment of bundles to nodes, given how many engines fit.

If the size of an engine divides that of a block or vice versa, placing the larger first is optimal on any
nodes. Otherwise the best split is searched node by node.
"""

import bisect
from collections.abc import Sequence

from rlhf_stack.placement.model import ENGINES, Engines, Plan, Request, chunks, count_fitting, count_split


class Packing:
    """The state of a placement in progress; ``free`` is the number of free bundles by node."""

    def __init__(self, free: Sequence[int], request: Request) -> None:
        self._free = list(free)
        self._request = request
        self._engines = Engines(0, 1)
        self._engine_nodes: list[int] = []
        self._straddling: list[int] = []
        self._blocks: dict[str, dict[int, int]] = {group.name: {} for group in request.groups}
        self._unplaced = {group.name: group.size for group in request.groups}

    def place(self, engines: Engines, unit: int, units: int, local: int) -> None:
        """Place all engines, in ``units`` of which ``local`` each fit on one node; larger blocks go first."""
        self._begin(engines)
        block = self._request.tp_sp_size
        if block > unit and block % unit == 0:
            self._place_blocks((count_fitting(self._free, unit) - local) * unit // block)
        exchangeable = block % unit == 0 or unit % block == 0
        counts = self._by_fit(unit, local) if exchangeable else self._by_search(unit, local)
        for node, count in sorted(counts.items()):
            self._free[node] -= count * unit
            self._engine_nodes += [node] * (count * unit)
        for index in range(local, units):
            self._engine_nodes += self._take(unit)
            self._straddling.append(index)

    def place_wide(self, engines: Engines) -> None:
        """Place engines larger than every node: on the emptiest whole nodes, the rest by best fit."""
        self._begin(engines)
        order = self._order()
        for _ in range(engines.count):
            self._engine_nodes += self._take_from(order, engines.size)

    def finish(self) -> Plan:
        """Place the trainer's blocks, then the ranks of blocks that fit on no node; return the plan."""
        self._place_blocks(self._request.size)
        shares = self._engines.shares
        bundles: dict[str, tuple[int, ...]] = {}
        split = {}
        for group in self._request.groups:
            whole = [node for node, count in sorted(self._blocks[group.name].items()) for _ in range(count)]
            shared = self._engine_nodes if group.name == shares else []
            bundles[group.name] = (*shared, *whole, *self._take(self._unplaced[group.name]))
            if count := count_split(bundles[group.name], self._request.tp_sp_size):
                split[group.name] = count
        if self._engines.count and not shares:
            bundles[ENGINES] = tuple(self._engine_nodes)
        nodes = tuple(chunks(self._engine_nodes, self._engines.size))
        return Plan(bundles, nodes, tuple(self._straddling), split)

    def _begin(self, engines: Engines) -> None:
        self._engines = engines
        if engines.shares:
            self._unplaced[engines.shares] -= engines.count * engines.size

    def _place_blocks(self, limit: int) -> None:
        """Place at most ``limit`` whole blocks of the unplaced groups, the largest group first."""
        block = self._request.tp_sp_size
        for name in sorted(self._unplaced, key=lambda name: -self._unplaced[name]):
            left = min(self._unplaced[name] // block, limit)
            order = sorted((count // block, node) for node, count in enumerate(self._free) if count >= block)
            while left and order:
                # The smallest node that has room for all, else the emptiest.
                room, node = order.pop(min(bisect.bisect_left(order, (left, 0)), len(order) - 1))
                count = min(room, left)
                self._free[node] -= count * block
                self._blocks[name][node] = self._blocks[name].get(node, 0) + count * block
                self._unplaced[name] -= count * block
                left -= count
                limit -= count

    def _by_fit(self, unit: int, count: int) -> dict[int, int]:
        """Return units by node: first nodes that they fill, then smaller ones, so whole nodes stay free."""
        found = {}
        nodes = [node for node, free in enumerate(self._free) if free >= unit]
        for node in sorted(nodes, key=lambda node: (self._free[node] % unit, self._free[node], node)):
            if not count:
                break
            found[node] = min(count, self._free[node] // unit)
            count -= found[node]
        return found

    def _by_search(self, unit: int, count: int) -> dict[int, int]:
        """Return units by node such that as many blocks as possible fit next to them.

        Dynamic programming over nodes and the number of units so far: time and memory grow with nodes times
        units. Only sizes of which neither divides the other need it.
        """
        block = self._request.tp_sp_size
        best: dict[int, int] = {0: 0}
        choices: list[dict[int, int]] = []
        for free in self._free:
            following: dict[int, int] = {}
            choice: dict[int, int] = {}
            for so_far, blocks in best.items():
                for added in range(min(free // unit, count - so_far) + 1):
                    total = blocks + (free - added * unit) // block
                    if total > following.get(so_far + added, -1):
                        following[so_far + added] = total
                        choice[so_far + added] = added
            best = following
            choices.append(choice)
        found = {}
        for node in reversed(range(len(choices))):
            found[node] = choices[node][count]
            count -= found[node]
        return found

    def _order(self) -> list[tuple[int, int]]:
        """Return (free bundles, node) of nodes with room, the fullest first, for `_take_from`."""
        return sorted((free, node) for node, free in enumerate(self._free) if free)

    def _take(self, count: int) -> list[int]:
        """Take ``count`` bundles from as few nodes as possible; return their nodes."""
        return self._take_from(self._order(), count) if count else []

    def _take_from(self, order: list[tuple[int, int]], count: int) -> list[int]:
        """Take ``count`` bundles: whole emptiest nodes, then the smallest with room; sorts ``order``."""
        nodes: list[int] = []
        while count:
            free, node = order.pop(min(bisect.bisect_left(order, (count, 0)), len(order) - 1))
            taken = min(free, count)
            nodes += [node] * taken
            count -= taken
            self._free[node] -= taken
            if free > taken:
                bisect.insort(order, (free - taken, node))
        return nodes
