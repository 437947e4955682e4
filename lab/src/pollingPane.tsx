// A pane of the main area that reads one thing from the server while it is visible.

import { ReactWidget } from '@jupyterlab/apputils';
import { LabIcon } from '@jupyterlab/ui-components';
import { Poll } from '@lumino/polling';
import * as React from 'react';

import { onReconnect } from './api';
import { MAX_MS } from './model';
import { Trouble } from './panel';

export abstract class PollingPane<T> extends ReactWidget {
  protected data: T | null = null;
  protected error = '';
  protected poll: Poll;
  private disconnect: () => void;

  constructor(label: string, icon: LabIcon, intervalMs: number) {
    super();
    this.addClass('wb-Pane');
    this.title.label = label;
    this.title.icon = icon;
    this.title.closable = true;
    this.poll = new Poll({
      factory: () => this.fetch(),
      frequency: { interval: intervalMs, backoff: true, max: MAX_MS },
      name: `workbench:${label}`,
      standby: () => !this.isVisible || document.hidden
    });
    this.disconnect = onReconnect(() => this.isVisible && void this.poll.refresh().catch(() => undefined));
  }

  /** Ask the server. */
  protected abstract read(): Promise<T>;

  protected abstract draw(data: T): JSX.Element;

  /** Called with each answer. */
  protected received(data: T): void {
    this.data = data;
  }

  dispose(): void {
    if (!this.isDisposed) {
      this.disconnect();
      this.poll.dispose();
      super.dispose();
    }
  }

  protected onAfterShow(msg: any): void {
    super.onAfterShow(msg);
    void this.poll.refresh().catch(() => undefined);
  }

  protected setInterval(intervalMs: number): void {
    if (intervalMs !== this.poll.frequency.interval) {
      this.poll.frequency = { interval: intervalMs, backoff: true, max: MAX_MS };
    }
  }

  private async fetch(): Promise<void> {
    try {
      const data = await this.read();
      this.error = '';
      this.received(data);
    } catch (error) {
      this.error = (error as Error).message;
      throw error; // the poll backs off; what was read stays
    } finally {
      this.update();
    }
  }

  protected render(): JSX.Element {
    return (
      <>
        {this.error && <Trouble text={this.error} />}
        {this.data !== null && this.draw(this.data)}
        {this.data === null && !this.error && <div className="wb-Empty">Reading…</div>}
      </>
    );
  }
}
