// The logs of a cluster.

import { ReactWidget } from '@jupyterlab/apputils';
import { LabIcon } from '@jupyterlab/ui-components';
import { Poll } from '@lumino/polling';
import * as React from 'react';

import { Api, Log } from './api';
import { Trouble } from './panel';

export class LogPane extends ReactWidget {
  private log: Log | null = null;
  private error = '';
  private poll: Poll;

  constructor(
    readonly cluster: string,
    private api: Api,
    icon: LabIcon
  ) {
    super();
    this.addClass('wb-Pane');
    this.title.label = `Logs of ${cluster}`;
    this.title.icon = icon;
    this.title.closable = true;
    this.poll = new Poll({
      factory: () => this.fetch(),
      frequency: { interval: 2000, backoff: true, max: 30000 },
      name: `workbench:log:${cluster}`,
      standby: () => !this.isVisible || document.hidden
    });
  }

  dispose(): void {
    if (!this.isDisposed) {
      this.poll.dispose();
      super.dispose();
    }
  }

  private async fetch(): Promise<void> {
    try {
      this.log = await this.api.log(this.cluster);
      this.error = '';
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
        {this.log?.files.map(file => (
          <section key={file.name} aria-label={file.name}>
            <h3>{file.name}</h3>
            <pre className="wb-Log" tabIndex={0}>
              {file.text}
            </pre>
          </section>
        ))}
        {this.log && !this.log.files.length && <div className="wb-Empty">The ranks have printed nothing yet.</div>}
        {!this.log && !this.error && <div className="wb-Empty">Reading the logs…</div>}
      </>
    );
  }
}
