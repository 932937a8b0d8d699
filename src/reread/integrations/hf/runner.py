"""How decode steps run on the GPU: which conversation has which arena, and whether steps are graphs
or run kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...attention import StepPlan, choose, tail_mass
from ...config import Config
from ...cuda import check_memory
from ...device import HOLES, Arena
from ...errors import RereadError, UnsupportedError
from ...lanes import RING
from ...layer import DeviceRow
from ...steps import StepShape
from ...types import KVView, StepKind
from .capturable import obstacle, unknown_argument
from .conversation import Conversation
from .device_step import DeviceStep
from .facts import kv_shape
from .graph import StepGraphs, Weights, decoder_layers
from .indexed import Reader, kernels_lack


class Runner:
    """Made by a session whose backend is Triton.

    Attributes:
        obstacle: why steps are not captured; "" where they are.
        ran: how the latest step ran, for the stats.
        uncaptured: the argument that kept the latest step from being captured; "" if none.
        notes: what else the user should know.
    """

    def __init__(
        self, model: Any, config: Config, layers: tuple[int, ...], reader: Reader | None = None
    ) -> None:
        """`layers`: indices of those that are made sparse; `reader`: of the indexer, if any.

        Raises:
            UnsupportedError: a head dim or dtype that the kernels do not cover, or
                runner="graph" where steps cannot be captured.
        """
        self._model, self._config, self._reader = model, config, reader
        text = model.config.get_text_config(decoder=True)
        self.heads = int(text.num_attention_heads)
        self._kv_heads, self._dim = kv_shape(text)
        self._layers = layers
        self._forward: Callable[..., Any] = model.forward
        self._weights: Weights | None = None
        self._compiles = True
        self._arenas: list[Arena] = []
        self._graphs: dict[Arena, StepGraphs] = {}
        self.ran = ""
        self.notes: list[str] = []
        self.uncaptured = ""
        self._forever = "runner='eager'" if config.runner == "eager" else ""
        if "forward" in vars(model):
            self._forever = "the model has a forward of its own, which would be passed over"
        self.obstacle = ""
        self.check(1, 1)
        self._look()

    def close(self) -> None:
        """Give back graphs, arenas and changed weights."""
        self._graphs.clear()
        self._arenas.clear()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    # -- before a prefill

    def check(self, rows: int, positions: int) -> None:
        """Refuse a conversation that the kernels do not cover, before its prefill.

        Raises:
            UnsupportedError: names the value.
        """
        reason = ops.kernels_lack(
            rows, self.heads, self._kv_heads, self._dim, positions, self._model.dtype
        )
        if self._model.device.type == "cpu" and self._model.dtype == torch.bfloat16:
            reason = "bfloat16 where they are interpreted"
        if reason is None:
            group = self.heads // self._kv_heads
            reason = kernels_lack(self._config, self._reader, group, positions)
        if reason is not None:
            raise UnsupportedError(ops.refusal(reason))

    def prepare_prefill(self, conversation: Conversation, positions: int, holes: bool) -> None:
        """Before a prefill to `positions` columns in all: reuse an arena, or see that memory is
        there.

        Args:
            holes: whether a row has padding between its turns.

        Raises:
            UnsupportedError: the kernels do not cover it.
            InputError: the caches would not fit; says what would.
        """
        rows = len(conversation.controller.rows)
        self.check(rows, positions)
        if holes:
            raise UnsupportedError(ops.refusal(HOLES))
        self.recheck()
        if conversation.length:
            held = next(iter(conversation.states.values())).kv.capacity
            check_memory(self._model.device, self._bytes(rows), rows, positions, held)
            return
        free = [arena for arena in self._arenas if arena.owners.gone]
        for arena in free:
            if arena.rows == rows and arena.capacity >= positions and not arena.unfinished:
                arena.own(conversation.states)
                conversation.arena = arena
                return
        for arena in free:
            self._drop(arena)
        check_memory(self._model.device, self._bytes(rows), rows, positions)

    def recheck(self) -> None:
        """Before decoding: the model may have changed since it was attached. Between two steps it
        must not.

        Raises:
            UnsupportedError: runner="graph", and steps cannot be captured any more.
        """
        if self._weights is not None and self._weights.moved:
            self.close()
        self._look()
        if self._reader is not None and not self.obstacle and not self.stacked().index_beside:
            self.obstacle = "a layer's projections cannot be stacked with those of the indexer"
            self._refuse()

    def _look(self) -> None:
        """Without changing the model."""
        self.obstacle = self._forever or obstacle(self._model, self._layers)
        self._refuse()

    def _refuse(self, cause: Exception | None = None) -> None:
        if self.obstacle and self._config.runner == "graph":
            raise UnsupportedError(f"runner='graph' is not possible: {self.obstacle}") from cause

    def _drop(self, arena: Arena) -> None:
        self._arenas.remove(arena)
        self._graphs.pop(arena, None)

    def _bytes(self, rows: int) -> int:
        """Of one position in all rows: keys and values, and the scratch of slow steps."""
        size = int(self._model.dtype.itemsize)
        keys = 2 * self._kv_heads * self._dim * size * len(self._layers)
        scratch = 4 * (self.heads + 4 * self._kv_heads) * RING
        index = 0 if self._reader is None else self._reader.indexer.card.width
        return rows * (keys + scratch + index * size * len(self._layers))

    # -- a decode step

    @torch.inference_mode(False)
    def prepare(self, conversation: Conversation) -> None:
        """Before a step is planned: room for its keys, and an arena around the caches."""
        states, before = conversation.states, conversation.arena
        for state in states.values():
            state.kv.ensure_room()
        whole = before is not None and not before.unfinished
        if before is not None and whole and before.owners.unmoved(states):
            return
        theta = 0.0 if self._reader is None else self._reader.indexer.card.theta
        arena = Arena(states, self.heads, self._config, theta=theta)
        if before is not None and whole and before.rows == arena.rows:
            arena.inherit(before)
        else:
            for state in states.values():
                state.chosen = [None] * len(state.chosen)
        for old in [old for old in self._arenas if old.owners.some_of(states)]:
            self._drop(old)
        self._arenas.append(arena)
        conversation.arena = arena

    def begin(self, conversation: Conversation, plan: StepPlan) -> DeviceStep:
        """Tell the device what the step is."""
        arena = conversation.arena
        assert arena is not None
        if self._config.mode != "indexed":
            self.seed(conversation, plan)
        return DeviceStep(conversation, arena, plan, arena.begin(plan, conversation.states))

    def seed(self, conversation: Conversation, plan: StepPlan) -> None:
        """For rows whose step is fast though nothing is selected: the first after a prefill,
        chosen by the prefill's own last queries."""
        arena = conversation.arena
        assert arena is not None
        chosen = conversation.states[arena.layers[0]].chosen
        for b, kind in enumerate(plan.kinds):
            if kind is StepKind.FAST and chosen[b] is None:
                self._seed(conversation, arena, plan, b)

    def _seed(self, conversation: Conversation, arena: Arena, plan: StepPlan, b: int) -> None:
        # the first layer last: what it has is what the next step goes by, also after an interrupt
        for i, state in reversed(conversation.states.items()):
            end = state.kv.length
            view = KVView(
                state.kv.keys, state.kv.values, plan.starts, (end,) * arena.rows, plan.valid
            ).row(b)
            before, mass, allowed = tail_mass(state, b, view, self._config, state.scale)
            indices, counts = choose(state, b, before, mass, allowed, self._config)
            arena.seed(b, i, indices, counts)
            window = min(allowed[1], before.lengths[0])
            state.chosen[b] = DeviceRow(window, int(counts[0]))

    @property
    def told(self) -> list[str]:
        """Notes for the stats of the call that has just ended."""
        why = self.obstacle or (self.uncaptured and f"the argument {self.uncaptured}")
        note = f"decode steps were not captured as graphs: {why}"
        return [*self.notes, *([note] if why and self.ran else [])]

    def run(self, step: DeviceStep, given: Mapping[str, Any]) -> Any | None:
        """The whole step as a graph; None where the model's own forward has to run.

        Args:
            given: arguments of the forward, by name.
        """
        ids, positions = given.get("input_ids"), given.get("position_ids")
        output = self.replay(step.arena, step.shape, ids, positions, step.plan.length, given)
        if output is None:
            return None
        for state in step.conversation.states.values():
            state.kv.advance(indexed=step.arena.index is not None)
        name = "cache" if "cache" in given else "past_key_values"
        # the graph writes its logits to the same place again in the next step
        return type(output)(logits=output.logits.clone(), **{name: given[name]})

    def replay(
        self,
        arena: Arena,
        shape: StepShape,
        ids: Tensor | None,
        positions: Tensor | None,
        length: int,
        given: Mapping[str, Any],
    ) -> Any | None:
        """The step that `arena` has been told as a graph, as `StepGraphs.run`; None where the
        model's own forward has to run."""
        odd = "" if self.obstacle else unknown_argument(self._model, given)
        if odd and self._config.runner == "graph":
            raise UnsupportedError(f"runner='graph' is not possible with the argument {odd}")
        self.uncaptured = odd
        output = None
        if not self.obstacle and not odd and ids is not None:
            output = self._try(arena, (shape, ids, positions, length))
        compiled = output is not None and self._graphs[arena].compiled
        self.ran = "eager" if output is None else "graph" + ", compiled layers" * compiled
        return output

    def _try(self, arena: Arena, run: tuple[StepShape, Tensor, Tensor | None, int]) -> Any | None:
        """Compiled and captured, else captured, else not at all; what failed is told."""
        while True:
            graphs = self._graphs_of(arena)
            try:
                return graphs.run(*run)
            except (RereadError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                # whatever the compiler or the capture says: the step can still run as it is
                first_line = (str(error).strip() or "no message").splitlines()[0][:200]
                told = f"{type(error).__name__}: {first_line}"
                del self._graphs[arena]
                arena.clean()
                if graphs.compiled:
                    self._compiles = False
                    self.notes.append(f"layers are not compiled ({told})")
                    continue
                self.obstacle = self._forever = f"the step could not be captured ({told})"
                self._refuse(error)
                return None

    @torch.inference_mode(False)
    def _graphs_of(self, arena: Arena) -> StepGraphs:
        found = self._graphs.get(arena)
        if found is None:
            found = self._graphs[arena] = StepGraphs(
                self._model, self._forward, arena, self.stacked(), compiled=self._compiles
            )
        return found

    @torch.inference_mode(False)
    def stacked(self) -> Weights:
        """The model's decoder layers and their stacked projections."""
        if self._weights is None:
            count = self._model.config.get_text_config(decoder=True).num_hidden_layers
            beside = () if self._reader is None else self._reader.rows
            layers = decoder_layers(self._model, count)
            self._weights = Weights(self._model, layers, beside)
        return self._weights
