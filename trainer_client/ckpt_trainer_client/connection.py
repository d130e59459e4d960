"""The client's side of the conversation with the sidecar: handshake, incoming messages, handles in flight.

| thread           | owner          | may touch                                        | ends               |
|------------------|----------------|--------------------------------------------------|--------------------|
| trainer's thread | the user       | planning, regions, handles                       | -                  |
| `ckpt-link`      | SidecarLink    | the socket; reports to pool, exchange, this file | close(): Farewell, join |
| `ckpt-stage`     | StageThread    | one filling; plan and regions in `prepare()`     | settle(): join     |
| `ckpt-callbacks` | CallbackThread | resolves handles, post-commit hooks, restarts a sidecar | close(): join |
| `ckpt-decide`    | CallbackThread | pre-commit hooks, if there are any               | close(): join      |
| `ckpt-stand-in`  | CallbackThread | stand-ins for a sidecar, if `no_sidecar` says so | close(): kill, join |
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from ckpt_proto.checkpoint_layout import checkpoint_id
from ckpt_proto.errors import FailureReport, RemoteProtocolError
from ckpt_proto.identity import SaveKey, step_text
from ckpt_proto.messages import (
    Aborted,
    AskCommit,
    Committed,
    Farewell,
    FinalPlan,
    GlobalPlan,
    Goodbye,
    Hello,
    MakeGlobalPlan,
    Message,
    Pong,
    Refused,
    RegionReady,
    RegionRefused,
    ReportFailure,
    ReportSkip,
    RestoreStep,
    ShardPersisted,
    SlotFreed,
    Status,
    SubmitShard,
    Welcome,
)
from ckpt_proto.process import process_start_s
from ckpt_trainer_client.callback_thread import CallbackThread
from ckpt_trainer_client.commit_decisions import CommitDecisions
from ckpt_trainer_client.commit_hooks import CommitHooks, PostCommitHook, PreCommitHook
from ckpt_trainer_client.config import ClientConfig
from ckpt_trainer_client.degraded_saves import DegradedSaves
from ckpt_trainer_client.handshake import Handshake
from ckpt_trainer_client.plan_exchange import PlanExchange
from ckpt_trainer_client.questions import Questions
from ckpt_trainer_client.region_pool import RegionPool
from ckpt_trainer_client.saves_in_flight import SavesInFlight
from ckpt_trainer_client.saves_of_client import SavesOfClient
from ckpt_trainer_client.sidecar_link import SidecarLink
from ckpt_trainer_client.sidecar_watch import SIDECAR_LOST, SidecarWatch
from ckpt_trainer_client.step_clock import StepClock
from ckpt_trainer_client.unanswered import Unanswered

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 30.0


class Connection:
    """One rank's connection, from Hello to Goodbye."""

    def __init__(self, config: ClientConfig, pre: tuple[PreCommitHook, ...], post: tuple[PostCommitHook, ...]) -> None:
        self._config = config
        self._hooks = CommitHooks(pre, post)
        self._callbacks = CallbackThread()
        self.steps = StepClock()
        self._link = SidecarLink(
            config.runtime_dir, self._on_message, self._on_beat, self._on_link_failure, self.steps.take
        )
        self._watch = SidecarWatch(config, self._callbacks.submit, self._on_lost, self._on_served)
        self._decisions = CommitDecisions(self._hooks, self.send)
        self.questions = Questions(self.send)
        self._handshake = Handshake(config, self._link.send, self._hello)
        self._torch_version = ""
        self.saves = SavesInFlight(self._callbacks)
        self.pool = RegionPool(config.slots)
        self.exchange = PlanExchange(self.send, config.stage_timeout_s)
        self.plan_epoch = 0
        self._replanned_seq = -1
        self.committed_steps: set[int] = set()
        self.session = ""
        self.next_seq = 0
        self.unanswered = Unanswered()
        self._degraded = self._degraded_saves() if config.no_sidecar == "degraded" else None

    def _degraded_saves(self) -> DegradedSaves:
        saves = SavesOfClient(
            session=lambda: self.session,
            next_seq=lambda: self.next_seq,
            pending=self.saves.pending,
            given_up=self.saves.given_up,
            submits=self._submits,
            holds=lambda submit: self.pool.holds(submit.slot, submit.save.seq),
            freed=lambda submit: self.pool.on_freed(submit.slot, submit.generation, submit.save.seq),
            persisted=self.saves.persisted,
            committed=lambda save: self._on_committed(
                Committed(save, checkpoint_id(self._config.directory, save.step))
            ),
            failed=self._fail,
            decision=self._decisions.decision,
            serve=self._serve,
        )
        return DegradedSaves(self._config, saves)

    def _submits(self) -> list[SubmitShard]:
        return self.unanswered.submits()  # of the session of now

    # ------------------------------------------------------------ handshake

    def open(self, torch_version: str) -> None:
        """Find or start a sidecar and be welcomed by it.

        Raises:
            SidecarUnreachable, SidecarRefused: as the client's constructor says.
        """
        self._torch_version = torch_version
        self._callbacks.start()
        self._decisions.start()
        if self._degraded is not None:
            self._degraded.start()
        self._link.start()
        self._link.start_heartbeat()
        try:
            self._handshake.meet(time.monotonic() + self._config.connect_timeout_s)
        except BaseException:
            self._link.send(Goodbye())  # it may know us all the same, and would take the next client for a second one
            self._end_threads()
            raise

    def _hello(self) -> Hello:
        config, next_seq = self._config, self.next_seq  # read before what is in flight: a save may begin meanwhile
        return Hello(
            job_id=config.job_id,
            rank=config.rank,
            world_size=config.world_size,
            pid=os.getpid(),
            process_start_s=process_start_s(os.getpid()) or 0.0,
            node=config.node,
            incarnation=config.incarnation,
            session=self.session,
            torch_version=self._torch_version,
            directory=config.directory,
            slots=config.slots,
            stage_timeout_s=config.stage_timeout_s,
            next_seq=next_seq,
            in_flight=tuple(save.seq for save in self.saves.pending()),
            coordinator=config.coordinator,
            degrades=self._degraded is not None,
        )

    # ------------------------------------------------------------ sending and waiting

    def send(self, message: Message) -> None:
        """Queue a message for the sidecar."""
        if isinstance(message, GlobalPlan):
            self.unanswered.made(message)
        self._link.send(message)

    def submit(self, submit: SubmitShard) -> None:
        """Hand a sealed region over; said again until its end is known."""
        self.unanswered.submitted(submit)
        self._link.send(submit)
        if self._degraded is not None:
            self._degraded.wake()

    def report(self, report: ReportFailure | ReportSkip) -> None:
        """Tell the other ranks that this one gave a save up; said again until the coordinator has aborted it."""
        self.unanswered.reported(report)
        self._link.send(report)

    def wait_idle(self, timeout_s: float | None) -> None:
        """Wait until every expected save has ended.

        Raises:
            TimeoutError: one has not; the text names it and who is late.
        """
        self.saves.wait_idle(timeout_s, self.questions.who_is_late)

    # ------------------------------------------------------------ arriving (thread ckpt-link)

    def _on_message(self, message: Message) -> None:
        self._watch.heard()
        match message:
            case RegionReady():
                self.pool.on_ready(message)
            case RegionRefused():
                logger.warning("slot %d cannot be used: %s", message.slot, message.failure)
                self.pool.on_refused(message)
            case SlotFreed(slot=slot, generation=generation, seq=seq):
                self.pool.on_freed(slot, generation, seq)
            case FinalPlan() | MakeGlobalPlan():
                self.unanswered.planned(message)
                self.exchange.on_message(message)
            case ShardPersisted(save=save):
                self.saves.persisted(save)
            case AskCommit():
                self._decisions.on_ask(message, is_open=message.save in self.saves.pending())
            case Committed():
                self._on_committed(message)
            case Aborted():
                self._on_aborted(message)
            case RestoreStep() | Status():
                self.questions.on_answer(message)
            case _:
                self._on_answer(message)

    def _on_answer(self, message: Message) -> None:
        match message:
            case Pong():
                self._handshake.on_pong(message)
            case Welcome():
                self._on_welcome(message)
            case Refused():
                self._on_refused(message)
            case Farewell():
                self._handshake.on_answer(message)

    def _on_refused(self, refused: Refused) -> None:
        if self.session and refused.failure.kind == RemoteProtocolError.__name__:
            logger.error("the sidecar could not read a message of this client: %s", refused.failure)
            return
        self._handshake.on_answer(refused)
        if self.session:  # refused when it came back to a restarted sidecar: nothing can be saved by this client
            logger.error("the sidecar refuses to go on with this client: %s", refused.failure)
            self.pool.interrupt(f"the sidecar refuses to go on with this client: {refused.failure}")
            self._fail_all("Refused", str(refused.failure), "restart the job")

    def _on_welcome(self, welcome: Welcome) -> None:
        again, before = self._handshake.is_welcome, self.session
        self.session = welcome.session
        self.committed_steps = set(welcome.committed_steps)
        self.pool.interrupt("")
        self._handshake.on_answer(welcome)
        if again:
            if welcome.session == before:
                self._resume(welcome)
            else:
                self._forget_session()
            self.questions.say_again(self.session)

    def _resume(self, welcome: Welcome) -> None:
        """The sidecar or the coordinator was restarted, or the connection renewed: say again what has no answer yet."""
        logger.info("welcomed again by sidecar %s: going on", welcome.sidecar_id)
        pending = self.saves.pending()
        again = self.unanswered.to_say_again(welcome.plan_id, pending, self.pool.holds)
        for message in (*self._decisions.vetoes(pending), *again):
            self._link.send(message)
        self.exchange.say_again()
        self.pool.resume()

    def _forget_session(self) -> None:
        """Our session is over and another has begun: the ranks plan anew, what was in flight is lost to us."""
        self.plan_epoch += 1
        self.unanswered = Unanswered()
        self.pool.reset()
        self._fail_all("SessionEnded", "the session ended", "the next save belongs to the new one")

    def _fail_all(self, kind: str, why: str, hint: str) -> None:
        """Fail every save in flight, staged or not."""
        for save in self.saves.pending():
            failure = FailureReport(kind, f"{why} while {step_text(save.step)} was in flight", hint)
            self._fail(save, [failure.at(self._config.rank, self._config.node)])

    def _fail(self, save: SaveKey, failures: Sequence[FailureReport]) -> None:
        """This rank gives a save up, staged or not, and says so to whom it concerns."""
        self.exchange.on_message(Aborted(save, tuple(failures)))
        self.saves.failed(save, failures)
        # Ranks that have not called save() for this attempt yet must not wait for this one when they do.
        self.report(ReportFailure(save, failures[0]))
        self.pool.wake()

    def _serve(self, unserved: FailureReport | None) -> None:
        """Tell a save that waits for a sidecar that there is none, or, by None, that there is one again."""
        self.exchange.serve(unserved)
        self.pool.serve(unserved)

    def _on_link_failure(self, error: Exception) -> None:
        self.pool.interrupt(f"the link to the sidecar has failed: {error}")
        self._fail_all("LinkFailed", f"the link to the sidecar failed ({error})", "this is a bug; restart the job")

    def _on_committed(self, message: Committed) -> None:
        step = message.save.step
        self.unanswered.ended(message.save)
        self.committed_steps.add(step)
        if self.saves.committed(message.save, message.checkpoint_id):  # a restarted coordinator may tell it twice
            self._callbacks.submit(partial(self._hooks.tell, step, message.checkpoint_id))

    def _on_aborted(self, message: Aborted) -> None:
        self.unanswered.ended(message.save)
        if message.replan and message.save.seq > self._replanned_seq:
            self.unanswered.forget_plan()
            self._replanned_seq = message.save.seq  # an order that is repeated must not cost the plan made since
            self.plan_epoch += 1
        self.exchange.on_message(message)
        if not message.files_stay:
            self.pool.break_seal(message.save.seq)  # before anybody is told: if both of us die now, it stays given up
        self.pool.wake()
        self.saves.failed(message.save, message.failures, skipped=message.skipped)

    def _on_beat(self) -> None:
        self._watch.beat(self._link.silent_s, time.monotonic())

    def _on_lost(self, failure: FailureReport) -> None:
        """There is no sidecar, or none that answers: nothing that waits for it may wait on."""
        if self._degraded is not None and self.session and failure.kind == SIDECAR_LOST:
            self._allow()
            if not self._handshake.is_parting:
                self._degraded.begin(failure)
            return
        self.pool.interrupt(failure.message)
        self._fail_all(failure.kind, failure.message, failure.hint)

    def _on_served(self) -> None:
        self._allow()
        if self._degraded is not None:
            self._degraded.end()
        else:
            logger.warning("the sidecar of job %s answers again", self._config.job_id)

    def _allow(self) -> None:
        if not self._handshake.is_refused:
            self.pool.interrupt("")

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Say goodbye and end both threads; a sidecar that is away is not waited for."""
        self._watch.stop()
        if not self._handshake.part(time.monotonic() + ANSWER_TIMEOUT_S):
            logger.warning("closed without the sidecar's farewell: it is away")
        self._end_threads()

    def _end_threads(self) -> None:
        with ExitStack() as ending:  # each is ended even if another does not end; the link goes last
            ending.callback(self._link.close)
            ending.callback(self._callbacks.close, ANSWER_TIMEOUT_S)
            ending.callback(self._decisions.close, ANSWER_TIMEOUT_S)
            if self._degraded is not None:
                ending.callback(self._degraded.close, ANSWER_TIMEOUT_S)
