// The side panel: clusters and runs.

import { ReactWidget } from '@jupyterlab/apputils';
import {
  addIcon,
  codeIcon,
  ellipsesIcon,
  listIcon,
  pauseIcon,
  PanelWithToolbar,
  refreshIcon,
  runIcon,
  SidePanel,
  spreadsheetIcon,
  stopIcon,
  LabIcon,
  ToolbarButton
} from '@jupyterlab/ui-components';
import { AccordionPanel } from '@lumino/widgets';
import * as React from 'react';

import { Cluster, Command, isLive, isSteerable, Run } from './api';
import { Sparkline } from './chart';
import { age, digits, duration, percent, plural, progress } from './format';
import { PanelModel, SHOWN_RUNS } from './model';

/** What the panel asks the application to do. */
export interface Actions {
  insert(code: string): void;
  openRun(name: string): void;
  openTable(): void;
  openLog(id: string): void;
  stopCluster(cluster: Cluster): void;
  clusterMenu(cluster: Cluster, below: Element): void;
  runMenu(run: Run, below: Element): void;
  drag(event: MouseEvent, label: string, code: string): void;
}

/** A button with an icon; its label is its tooltip and its accessible name. */
export function IconButton(props: {
  icon: LabIcon;
  label: string;
  onClick: (event: React.MouseEvent<HTMLButtonElement>) => void;
  disabled?: boolean;
}): JSX.Element {
  return (
    <button
      type="button"
      className="wb-IconButton"
      title={props.label}
      aria-label={props.label}
      disabled={props.disabled}
      onClick={props.onClick}
    >
      <props.icon.react tag="span" elementSize="normal" />
    </button>
  );
}

export function Dot(props: { state: string }): JSX.Element {
  return <span className="wb-Dot" data-state={props.state} aria-hidden="true" />;
}

/** Pause or resume, and stop. */
export function SteerButtons(props: { run: Run; model: PanelModel }): JSX.Element | null {
  const { run, model } = props;
  if (!isSteerable(run)) {
    return null;
  }
  const asked = model.waits(run);
  const give = (command: Command) => () => void model.steer(run, command);
  const paused = run.status === 'paused';
  return (
    <>
      {paused ? (
        <IconButton icon={runIcon} label="Resume" disabled={Boolean(asked)} onClick={give('resume')} />
      ) : (
        <IconButton icon={pauseIcon} label="Pause at the end of a step" disabled={Boolean(asked)} onClick={give('pause')} />
      )}
      <IconButton
        icon={stopIcon}
        label="Stop, with a checkpoint"
        disabled={asked === 'stop'}
        onClick={give('stop')}
      />
    </>
  );
}

/** The state of a run in a word; while a command waits, what it will be. */
export function stateOf(run: Run, asked: Command | null): string {
  const words = { pause: 'pausing', resume: 'resuming', stop: 'stopping' };
  return asked ? words[asked] : run.status;
}

/** Facts in a line, which breaks between them. */
function Facts(props: { facts: React.ReactNode[] }): JSX.Element {
  const facts = props.facts.filter(Boolean);
  return (
    <div>
      {facts.map((fact, index) => (
        <React.Fragment key={index}>
          <span className="wb-Fact">
            {fact}
            {index < facts.length - 1 && ' ·'}
          </span>{' '}
        </React.Fragment>
      ))}
    </div>
  );
}

function ClusterRow(props: { cluster: Cluster; actions: Actions }): JSX.Element {
  const { cluster, actions } = props;
  const training = cluster.run_status && ['running', 'paused', 'starting'].includes(cluster.run_status);
  const dot = !cluster.alive ? 'lost' : training ? 'running' : cluster.attach ? 'detached' : 'ready';
  return (
    <li
      className="wb-Row"
      data-cluster={cluster.id}
      data-drag={cluster.attach ? true : undefined}
      title={cluster.attach ? 'Drag it into a notebook to attach to it there' : undefined}
      onMouseDown={event => cluster.attach && actions.drag(event.nativeEvent, cluster.id, cluster.attach)}
    >
      <div className="wb-Row-head">
        <Dot state={dot} />
        <span className="wb-Row-title" title={cluster.id}>
          {cluster.id}
        </span>
        <span className="wb-Row-buttons">
          {cluster.attach && (
            <IconButton
              icon={codeIcon}
              label={`Attach: insert code for ${cluster.id}`}
              onClick={() => actions.insert(cluster.attach!)}
            />
          )}
          <IconButton icon={listIcon} label={`Logs of ${cluster.id}`} onClick={() => actions.openLog(cluster.id)} />
          <IconButton icon={stopIcon} label={`Stop ${cluster.id}`} onClick={() => actions.stopCluster(cluster)} />
          <IconButton
            icon={ellipsesIcon}
            label={`More for ${cluster.id}`}
            onClick={event => actions.clusterMenu(cluster, event.currentTarget)}
          />
        </span>
      </div>
      <div className="wb-Row-facts">
        <Facts
          facts={[
            cluster.num_ranks === null ? null : plural(cluster.num_ranks, 'rank'),
            cluster.num_gone ? (
              <span className="wb-State" data-state="lost">{`${plural(cluster.num_gone, 'rank')} ended`}</span>
            ) : null,
            cluster.launcher,
            cluster.state,
            age(1000 * cluster.since_s)
          ]}
        />
      </div>
      {cluster.run && (
        <div className="wb-Row-facts">
          <button type="button" className="wb-Link" onClick={() => actions.openRun(cluster.run!)}>
            {training ? `training: ${cluster.run_status}` : `last training: ${cluster.run_status ?? 'removed'}`}
          </button>
        </div>
      )}
    </li>
  );
}

function Clusters(props: { model: PanelModel; actions: Actions }): JSX.Element {
  const { model, actions } = props;
  if (!model.clusters) {
    return model.error ? <Trouble text={model.error} /> : <div className="wb-Empty">Looking for clusters…</div>;
  }
  if (model.error) {
    return (
      <>
        <Trouble text={model.error} />
        <ClusterList model={model} actions={actions} />
      </>
    );
  }
  if (!model.clusters.length) {
    return (
      <div className="wb-Empty">
        <p>No cluster is alive. A cluster is a set of ranks that stay alive between trainings.</p>
        <button type="button" className="wb-Button" onClick={() => actions.insert('cluster = wb.Cluster(4)')}>
          Insert <code>wb.Cluster(4)</code>
        </button>
      </div>
    );
  }
  return <ClusterList model={model} actions={actions} />;
}

function ClusterList(props: { model: PanelModel; actions: Actions }): JSX.Element {
  const { model, actions } = props;
  return (
    <ul className="wb-List" aria-label="Clusters">
      {model.clusters?.map(cluster => (
        <ClusterRow key={cluster.id} cluster={cluster} actions={actions} />
      ))}
    </ul>
  );
}

function RunRow(props: { run: Run; model: PanelModel; actions: Actions }): JSX.Element {
  const { run, model, actions } = props;
  const state = stateOf(run, model.waits(run));
  const facts = [
    <span key="state" className="wb-State" data-state={run.status}>
      {state}
    </span>,
    progress(run),
    run.accuracy !== null && run.accuracy !== undefined
      ? percent(run.accuracy)
      : run.train_loss !== null && run.train_loss !== undefined
        ? `loss ${digits(run.train_loss)}`
        : null,
    run.left_s !== null && run.status === 'running' ? `${duration(run.left_s)} left` : null
  ];
  const last = run.curve?.length ? run.curve[run.curve.length - 1] : null;
  const share = run.num_steps ? Math.min(1, run.steps / run.num_steps) : null;
  return (
    <li className="wb-Row" data-run={run.run} data-status={run.status}>
      <div className="wb-Row-head">
        <Dot state={run.status} />
        <button
          type="button"
          className="wb-Row-title wb-Link"
          title={`${run.label}\n${run.run}\nOpen its curves`}
          onClick={() => actions.openRun(run.run)}
        >
          {run.label}
        </button>
        <span className="wb-Row-buttons">
          <SteerButtons run={run} model={model} />
          <IconButton
            icon={ellipsesIcon}
            label={`More for ${run.label}`}
            onClick={event => actions.runMenu(run, event.currentTarget)}
          />
        </span>
      </div>
      <div className="wb-Row-facts">
        <Facts facts={facts} />
        <div className="wb-Row-body">
          <Facts
            facts={[
              run.problem,
              run.workers === null ? null : plural(run.workers, 'rank'),
              run.created ? age(Date.parse(run.created)) : null
            ]}
          />
          <Sparkline values={run.curve} label={`training loss${last === null ? '' : `, now ${digits(last)}`}`} />
        </div>
      </div>
      {run.error && ['failed', 'killed', 'lost'].includes(run.status) && (
        <div className="wb-Row-error" title={run.error}>
          {run.error.split('\n')[0]}
        </div>
      )}
      {share !== null && isLive(run) && (
        <div className="wb-Progress" role="progressbar" aria-label="steps" aria-valuenow={Math.round(100 * share)}>
          <div style={{ width: `${100 * share}%` }} />
        </div>
      )}
    </li>
  );
}

function Runs(props: { model: PanelModel; actions: Actions }): JSX.Element {
  const { model, actions } = props;
  if (!model.runs) {
    return model.error ? <Trouble text={model.error} /> : <div className="wb-Empty">Reading the runs…</div>;
  }
  if (!model.runs.length) {
    const code = 'cluster = wb.Cluster(2)\nrun = cluster.train(wb.PipeSGD(), wb.problems.digits_mlp(), epochs=5)\nrun';
    return (
      <div className="wb-Empty">
        <p>No run yet. Train in a notebook or with <code>workbench train</code>, and the run appears here.</p>
        <button type="button" className="wb-Button" onClick={() => actions.insert(code)}>
          Insert an example
        </button>
        <p className="wb-Quiet">
          {model.stores.length
            ? `Looked in ${model.stores.join(', ')}.`
            : 'There is no run store yet: WORKBENCH_RUNS names its folder, or it is the folder runs next to the notebook.'}
        </p>
      </div>
    );
  }
  return (
    <>
      <ul className="wb-List" aria-label="Runs">
        {model.runs.map(run => (
          <RunRow key={run.run} run={run} model={model} actions={actions} />
        ))}
      </ul>
      {model.numRuns > SHOWN_RUNS && (
        <button type="button" className="wb-Button wb-More" onClick={() => actions.openTable()}>
          All {model.numRuns.toLocaleString('en-US')} runs in a table
        </button>
      )}
    </>
  );
}

export function Trouble(props: { text: string }): JSX.Element {
  return (
    <div className="wb-Row-error wb-Trouble" role="alert">
      {props.text}
    </div>
  );
}

class Section extends ReactWidget {
  constructor(
    private model: PanelModel,
    private draw: () => JSX.Element
  ) {
    super();
    this.addClass('wb-Section');
    model.changed.connect(this.update, this);
  }

  dispose(): void {
    this.model.changed.disconnect(this.update, this);
    super.dispose();
  }

  protected render(): JSX.Element {
    return this.draw();
  }
}

export class WorkbenchPanel extends SidePanel {
  constructor(
    private model: PanelModel,
    icon: LabIcon,
    actions: Actions
  ) {
    super();
    this.id = 'workbench-panel';
    this.title.icon = icon;
    this.title.caption = 'Workbench: clusters and runs';
    this.addClass('wb-Panel');
    const clusters = this.section('Clusters', () => <Clusters model={model} actions={actions} />, [
      new ToolbarButton({
        icon: addIcon,
        tooltip: 'Start a cluster: insert code into the notebook',
        onClick: () => actions.insert('cluster = wb.Cluster(4)')
      })
    ]);
    const runs = this.section('Runs', () => <Runs model={model} actions={actions} />, [
      new ToolbarButton({ icon: spreadsheetIcon, tooltip: 'Open the run table', onClick: () => actions.openTable() })
    ]);
    this.addWidget(clusters);
    this.addWidget(runs);
    (this.content as AccordionPanel).setRelativeSizes([2, 5]);
  }

  /** Expand a section: 0 for the clusters, 1 for the runs. */
  expandSection(index: number): void {
    (this.content as AccordionPanel).expand(index);
  }

  private section(name: string, draw: () => JSX.Element, buttons: ToolbarButton[]): PanelWithToolbar {
    const section = new PanelWithToolbar();
    section.addClass('wb-SectionBox');
    section.title.label = name;
    section.addWidget(new Section(this.model, draw));
    buttons.forEach((button, index) => section.toolbar.addItem(`button-${index}`, button));
    section.toolbar.addItem(
      'refresh',
      new ToolbarButton({ icon: refreshIcon, tooltip: `Read the ${name.toLowerCase()} again`, onClick: () => this.model.refresh() })
    );
    return section;
  }

  protected onAfterShow(msg: any): void {
    super.onAfterShow(msg);
    this.model.visible = true;
    this.model.refresh();
  }

  protected onAfterHide(msg: any): void {
    super.onAfterHide(msg);
    this.model.visible = false;
  }
}
