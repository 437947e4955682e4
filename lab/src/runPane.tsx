// A run in the main area: its state, its curves, and code that uses it.

import { Clipboard, Notification } from '@jupyterlab/apputils';
import { ellipsesIcon, LabIcon } from '@jupyterlab/ui-components';
import * as React from 'react';

import { complain } from './actions';
import { Api, isLive, OneRun, Run } from './api';
import { abscissa, FIRST_LOOK, smoothed, Switches, X_TITLES } from './axes';
import { Chart, Line } from './chart';
import { bytes, digits, duration, percent, plural, progress } from './format';
import { PanelModel } from './model';
import { Dot, IconButton, stateOf, SteerButtons, Trouble } from './panel';
import { PollingPane } from './pollingPane';

const COLORS = ['var(--jp-brand-color1)', 'var(--jp-warn-color1)', 'var(--jp-success-color1)', 'var(--jp-accent-color1, var(--jp-info-color1))'];
const PURPOSES: [string, string, string][] = [
  ['open', 'Copy: open', 'Code that opens this run'],
  ['continue', 'Copy: continue', 'Code that continues from the newest checkpoint'],
  ['repeat', 'Copy: repeat', 'Code that trains again with these settings']
];

export class RunPane extends PollingPane<OneRun> {
  private code: Record<string, string> = {};

  constructor(
    readonly run: string,
    private api: Api,
    private model: PanelModel,
    private openMenu: (run: Run, below: Element) => void,
    private openTimeline: () => void,
    icon: LabIcon
  ) {
    super(run.replace(/^\d{8}-\d{6}-/, ''), icon, 1000);
    this.title.caption = run;
    model.changed.connect(this.follow, this);
  }

  dispose(): void {
    if (!this.isDisposed) {
      this.model.changed.disconnect(this.follow, this);
      super.dispose();
    }
  }

  /** Draw again; if the panel knows another state of the run, read it at once. */
  private follow(): void {
    const status = this.model.statusOf(this.run);
    if (this.data && status && status !== this.data.run.status && this.isVisible) {
      void this.poll.refresh().catch(() => undefined);
    }
    this.update();
  }

  protected async read(): Promise<OneRun> {
    const data = await this.api.run(this.run);
    if (data.run.status !== this.data?.run.status) {
      this.code = await this.api.code(this.run);
    }
    return data;
  }

  protected received(data: OneRun): void {
    super.received(data);
    this.title.label = data.run.label;
    this.setInterval(isLive(data.run) ? 1000 : 10000);
  }

  protected draw(data: OneRun): JSX.Element {
    return (
      <View data={data} code={this.code} model={this.model} openMenu={this.openMenu} openTimeline={this.openTimeline} />
    );
  }
}

function View(props: {
  data: OneRun;
  code: Record<string, string>;
  model: PanelModel;
  openMenu: (run: Run, below: Element) => void;
  openTimeline: () => void;
}): JSX.Element {
  const { data, code, model } = props;
  const { run, evaluations } = data;
  const [look, setLook] = React.useState(FIRST_LOOK);
  const { log } = look;
  const lossX = abscissa(data.loss, look.axis, data.steps_per_epoch);
  const testX = abscissa(evaluations, look.axis, data.steps_per_epoch);
  const range = [0, Math.max(0, ...lossX, ...testX)] as const;
  const xTitle = X_TITLES[look.axis];
  const lossLines: Line[] = [
    { name: 'training', x: lossX, y: smoothed(data.loss.values, look.smooth), color: COLORS[0] },
    { name: 'test', x: testX, y: evaluations.test_loss || [], color: COLORS[1], dashed: true }
  ];
  const metrics = Object.keys(evaluations).filter(name => !['steps', 'seconds', 'test_loss', 'accuracy'].includes(name));
  const copy = (purpose: string) => {
    try {
      Clipboard.copyToSystem(code[purpose]);
      Notification.success('The code was copied: paste it into a cell', { autoClose: 2500 });
    } catch (error) {
      complain(error);
    }
  };
  const facts: [string, React.ReactNode][] = [
    ['progress', progress(run)],
    ['time left', run.left_s !== null && run.status === 'running' ? duration(run.left_s) : null],
    ['accuracy', run.accuracy === null || run.accuracy === undefined ? null : percent(run.accuracy)],
    ['test loss', run.loss === null || run.loss === undefined ? null : digits(run.loss)],
    ['training loss', run.train_loss === null || run.train_loss === undefined ? null : digits(run.train_loss)],
    ['training time', run.seconds === null || run.seconds === undefined ? null : duration(run.seconds)],
    ['problem', run.problem],
    ['ranks', run.workers],
    ['runtime', run.runtime],
    ['learning rate', run.lr],
    ['steered', run.steered],
    ['batch size', run.batch_size],
    ['seed', run.seed],
    ['bytes sent', run.bytes_sent ? bytes(run.bytes_sent) : null],
    ['sweep', run.sweep]
  ];
  return (
    <div className="wb-Run">
      <header className="wb-Run-header">
        <Dot state={run.status} />
        <h2 title={run.label}>{run.label}</h2>
        <span className="wb-State" data-state={run.status} role="status">
          {stateOf(run, model.waits(run))}
        </span>
        <SteerButtons run={run} model={model} />
        <IconButton
          icon={ellipsesIcon}
          label={`More for ${run.label}`}
          onClick={event => props.openMenu(run, event.currentTarget)}
        />
      </header>
      <dl className="wb-Facts">
        {facts
          .filter(([, value]) => value !== null && value !== undefined && value !== '')
          .map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ))}
        <div className="wb-Facts-wide">
          <dt>folder</dt>
          <dd>{run.folder}</dd>
        </div>
      </dl>
      {run.error && ['failed', 'killed', 'lost'].includes(run.status) && <Trouble text={run.error} />}
      {data.failures.map(failure => (
        <details key={failure.rank} className="wb-Failure">
          <summary>Traceback of rank {failure.rank}</summary>
          <pre>{failure.traceback || failure.error}</pre>
        </details>
      ))}
      <div className="wb-Axes" role="group" aria-label="Axes and code">
        <Switches look={look} change={setLook} epochs={Boolean(data.steps_per_epoch)} />
        <span className="wb-Spacer" />
        <button type="button" className="wb-Button" title="What each rank did, and when" onClick={props.openTimeline}>
          Timeline
        </button>
        <span className="wb-Copy">
          {PURPOSES.filter(([purpose]) => code[purpose]).map(([purpose, label, title]) => (
            <button key={purpose} type="button" className="wb-Button" title={title} onClick={() => copy(purpose)}>
              {label}
            </button>
          ))}
        </span>
      </div>
      <Chart title="Loss" xTitle={xTitle} range={range} lines={lossLines} log={log} />
      {evaluations.accuracy && (
        <Chart
          title="Accuracy"
          xTitle={xTitle}
          range={range}
          lines={[{ name: 'test', x: testX, y: evaluations.accuracy, color: COLORS[2] }]}
          format={value => `${Number((100 * value).toPrecision(4))} %`}
        />
      )}
      {metrics.map((name, index) => (
        <Chart
          key={name}
          title={name}
          xTitle={xTitle}
          range={range}
          lines={[{ name, x: testX, y: evaluations[name], color: COLORS[index % COLORS.length] }]}
        />
      ))}
      {data.notes.length > 0 && (
        <details className="wb-Notes">
          <summary>{plural(data.notes.length, 'note')}</summary>
          <ul>
            {data.notes.map(note => (
              <li key={note}>{note}</li>
            ))}
          </ul>
        </details>
      )}
    </div>
  );
}
