// The logs of a cluster.

import { LabIcon } from '@jupyterlab/ui-components';
import * as React from 'react';

import { Api, Log } from './api';
import { PollingPane } from './pollingPane';

export class LogPane extends PollingPane<Log> {
  constructor(
    readonly cluster: string,
    private api: Api,
    icon: LabIcon
  ) {
    super(`Logs of ${cluster}`, icon, 2000);
  }

  protected read(): Promise<Log> {
    return this.api.log(this.cluster);
  }

  protected draw(log: Log): JSX.Element {
    return (
      <>
        {log.files.map(file => (
          <section key={file.name} aria-label={file.name}>
            <h3>{file.name}</h3>
            <pre className="wb-Log" tabIndex={0}>
              {file.text}
            </pre>
          </section>
        ))}
        {!log.files.length && <div className="wb-Empty">The ranks have printed nothing yet.</div>}
      </>
    );
  }
}
