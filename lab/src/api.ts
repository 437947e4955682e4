// What the Jupyter server answers below workbench/api/ (workbench/lab/handlers.py).

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

export type Value = string | number | boolean | null | undefined;

export interface Cluster {
  id: string;
  num_ranks: number | null;
  launcher: string | null;
  host: string | null;
  state: string;
  alive: boolean;
  owned: boolean;
  notebook: string | null; // of its owner
  num_gone: number; // ranks whose process has ended
  since_s: number;
  run: string | null;
  run_status: string | null;
  attach: string | null;
}

// A row of `workbench runs`, with the entries that the panel uses by name.
export interface Run {
  run: string;
  status: string;
  created: string | null;
  label: string;
  problem: string | null;
  workers: number | null;
  runtime: string | null;
  error: string | null;
  folder: string;
  steps: number;
  num_steps: number | null;
  left_s: number | null;
  accuracy: number | null;
  loss: number | null;
  train_loss: number | null;
  seconds: number | null;
  epochs?: number | null;
  curve?: (number | null)[] | null;
  [name: string]: any;
}

export interface RunList {
  runs: Run[];
  num_runs: number;
  version: number;
  stores: string[];
  pending: boolean;
}

export interface Curve {
  steps: number[];
  seconds: number[];
  values: (number | null)[];
}

export interface OneRun {
  run: Run;
  loss: Curve;
  evaluations: { steps: number[]; seconds: number[]; [metric: string]: (number | null)[] };
  failures: { rank: number; error: string; traceback: string }[];
  notes: string[];
  steps_per_epoch: number | null;
}

// What a rank does and uses (workbench/lab/rank_rows.py).
export interface Rank {
  rank: number;
  host: string | null;
  pid: number | null;
  device: string | null;
  state: string;
  does: string | null;
  step: number | null;
  beat_s: number | null;
  cpu_cores: number | null;
  memory_bytes: number | null;
  sent_bytes_per_s: number | null;
  gpu: { name: string; share: number | null; used_bytes: number; total_bytes: number } | null;
  straggler: string | null;
}

export interface Ranks {
  ranks: Rank[];
  run: string | null;
  status: string | null;
}

export interface MeanCurve extends Curve {
  low?: number[];
  high?: number[];
}

export interface Comparison {
  series: {
    label: string;
    runs: string[];
    statuses: string[];
    steps_per_epoch: number | null;
    curves: Record<string, MeanCurve>;
  }[];
  differences: { key: string; values: Value[][] }[];
}

export interface Log {
  files: { name: string; text: string }[];
}

export type Command = 'pause' | 'resume' | 'stop';

export const ENDED = ['finished', 'failed', 'stopped', 'killed', 'lost'];

/** Whether a run has not ended. */
export function isLive(run: Run): boolean {
  return !ENDED.includes(run.status);
}

/** Whether a run accepts commands: simulated runs and the user's own loops do not. */
export function isSteerable(run: Run): boolean {
  return isLive(run) && ['mpi', 'torch'].includes(run.runtime ?? '');
}

export const OFFLINE = 'No connection to the Jupyter server. The panel tries again until it answers.';
const LOGGED_OUT = 'You are logged out of the Jupyter server: reload this page.';

/** Call `refresh` when the machine has woken up or is online again: a poll that failed waits before its next try. */
export function onReconnect(refresh: () => void): () => void {
  const visible = () => document.hidden || refresh();
  window.addEventListener('online', refresh);
  document.addEventListener('visibilitychange', visible);
  document.addEventListener('resume', refresh);
  return () => {
    window.removeEventListener('online', refresh);
    document.removeEventListener('visibilitychange', visible);
    document.removeEventListener('resume', refresh);
  };
}

/** The server's answers; the settings carry its base URL, token and XSRF cookie. */
export class Api {
  constructor(private settings: ServerConnection.ISettings) {}

  clusters(): Promise<{ clusters: Cluster[] }> {
    return this.request('clusters');
  }

  log(id: string): Promise<Log> {
    return this.request(`clusters/${encodeURIComponent(id)}/log`);
  }

  stopCluster(id: string): Promise<{ message: string }> {
    return this.request(`clusters/${encodeURIComponent(id)}/stop`, 'POST');
  }

  runs(query: string): Promise<RunList> {
    return this.request(`runs?${query}`);
  }

  run(name: string): Promise<OneRun> {
    return this.request(`runs/${encodeURIComponent(name)}`);
  }

  code(name: string, after?: number): Promise<Record<string, string>> {
    return this.request(`runs/${encodeURIComponent(name)}/code${after === undefined ? '' : `?after=${after}`}`);
  }

  /** The numbers of steps of the run's checkpoints, the newest first. */
  async checkpoints(name: string): Promise<number[]> {
    return (await this.request<{ steps: number[] }>(`runs/${encodeURIComponent(name)}/checkpoints`)).steps;
  }

  ranks(kind: 'runs' | 'clusters', name: string): Promise<Ranks> {
    return this.request(`${kind}/${encodeURIComponent(name)}/ranks`);
  }

  compare(names: string[]): Promise<Comparison> {
    return this.request(`compare?${names.map(name => `run=${encodeURIComponent(name)}`).join('&')}`);
  }

  /** Scale or heal a detached cluster. */
  changeCluster(id: string, change: string): Promise<{ message: string }> {
    return this.request(`clusters/${encodeURIComponent(id)}/${change}`, 'POST');
  }

  timeline(name: string, query: string): Promise<{ live: boolean }> {
    return this.request(`runs/${encodeURIComponent(name)}/timeline?${query}`);
  }

  /** A file of the server extension. */
  async text(name: string): Promise<string> {
    const url = URLExt.join(this.settings.baseUrl, 'workbench/api', name);
    const response = await ServerConnection.makeRequest(url, {}, this.settings);
    if (!response.ok) {
      throw new Error(`${name}: ${response.status} ${response.statusText}`);
    }
    return response.text();
  }

  steer(name: string, command: Command): Promise<{ message: string }> {
    return this.request(`runs/${encodeURIComponent(name)}/${command}`, 'POST');
  }

  private async request<T>(path: string, method = 'GET'): Promise<T> {
    const url = URLExt.join(this.settings.baseUrl, 'workbench/api/') + path;
    const response = await ServerConnection.makeRequest(url, { method }, this.settings).catch(error => {
      throw error instanceof ServerConnection.NetworkError ? new Error(OFFLINE) : error;
    });
    const text = await response.text();
    let content: any = {};
    try {
      content = JSON.parse(text);
    } catch {
      if (response.ok) {
        throw new Error(LOGGED_OUT); // a proxy's page to log in
      } // else the status tells
    }
    if (response.status === 403 && /^Forbidden$|xsrf/i.test(content.message)) {
      throw new Error(LOGGED_OUT); // JupyterHub restarted the server, for example
    }
    if (!response.ok) {
      const missing = response.status === 404 && !content.message?.includes(' ');
      throw new Error(
        missing
          ? 'The server extension does not answer: install sgd-workbench in the environment of JupyterLab, and restart it'
          : content.message || `${response.status} ${response.statusText}`
      );
    }
    return content;
  }
}
