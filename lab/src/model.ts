// What the panel shows: polled from the server while something shows it.

import { Poll } from '@lumino/polling';
import { ISignal, Signal } from '@lumino/signaling';

import { Api, Cluster, Command, isLive, onReconnect, Run } from './api';
import { complain } from './actions';

const LIVE_MS = 1000;
const IDLE_MS = 4000;
const PENDING_MS = 400; // while curves of ended runs are read, or a command has not taken effect
const ASKED_MS = 150; // in the first seconds after a command: most take effect then
const SOON_MS = 2000;
const WAIT_MS = 60000; // a step may be long; then the buttons can be used again
const OLDER_MS = 2000; // how much older than the panel's a row of a pane may be
export const MAX_MS = 10000; // between two tries of a poll that fails
export const SHOWN_RUNS = 30;

export class PanelModel {
  clusters: Cluster[] | null = null;
  runs: Run[] | null = null;
  numRuns = 0;
  stores: string[] = [];
  error = '';
  /** Whether something shows the model; set by the panel. */
  visible = false;
  private asked = new Map<string, { command: Command; status: string; untilMs: number }>();
  private askedMs = 0; // when the last command was given
  private signal = new Signal<this, void>(this);
  private poll: Poll;

  constructor(readonly api: Api) {
    this.poll = new Poll({
      auto: false,
      factory: () => this.fetch(),
      frequency: { interval: IDLE_MS, backoff: true, max: MAX_MS },
      name: 'workbench:panel',
      standby: () => !this.visible || document.hidden
    });
    onReconnect(() => this.visible && this.refresh());
  }

  get changed(): ISignal<this, void> {
    return this.signal;
  }

  /** Fetch now. */
  refresh(): void {
    void (this.poll.state.phase === 'constructed' ? this.poll.start() : this.poll.refresh()).catch(() => undefined);
  }

  /** The command that a run was given and, by this row, has not carried out yet. */
  waits(run: Run): Command | null {
    const asked = this.asked.get(run.run);
    if (!asked || Date.now() > asked.untilMs) {
      return null;
    }
    if (asked.status !== run.status) {
      asked.untilMs = Math.min(asked.untilMs, Date.now() + OLDER_MS);
      return null;
    }
    return asked.command;
  }

  /** The state of a run in the panel, which may be newer than that in a pane. */
  statusOf(name: string): string | undefined {
    return this.runs?.find(run => run.run === name)?.status;
  }

  /** Give a command to a run. It takes effect at the end of a step. */
  async steer(run: Run, command: Command): Promise<void> {
    this.askedMs = Date.now();
    this.asked.set(run.run, { command, status: run.status, untilMs: Date.now() + WAIT_MS });
    this.signal.emit();
    try {
      await this.api.steer(run.run, command);
    } catch (error) {
      this.asked.delete(run.run);
      complain(error);
    }
    this.refresh();
  }

  private async fetch(): Promise<void> {
    try {
      const [clusters, runs] = await Promise.all([
        this.api.clusters(),
        this.api.runs(`limit=${SHOWN_RUNS}&curves=1`)
      ]);
      this.clusters = clusters.clusters;
      this.runs = runs.runs;
      this.numRuns = runs.num_runs;
      this.stores = runs.stores;
      this.error = '';
      this.asked.forEach((asked, name) => Date.now() > asked.untilMs && this.asked.delete(name));
      const live = this.runs.some(isLive);
      const soon = Date.now() < this.askedMs + SOON_MS;
      const pending = this.asked.size || runs.pending;
      const interval = soon ? ASKED_MS : pending ? PENDING_MS : live ? LIVE_MS : IDLE_MS;
      if (interval !== this.poll.frequency.interval) {
        this.poll.frequency = { interval, backoff: true, max: MAX_MS };
      }
    } catch (error) {
      this.error = (error as Error).message;
      throw error; // the poll backs off
    } finally {
      this.signal.emit();
    }
  }
}
