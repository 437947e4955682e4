// The plugin: the side panel, the panes and the commands.

import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, WidgetTracker } from '@jupyterlab/apputils';
import { DocumentRegistry } from '@jupyterlab/docregistry';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IStateDB } from '@jupyterlab/statedb';
import { LabIcon } from '@jupyterlab/ui-components';
import { IMessageHandler, Message, MessageLoop } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import {
  branchRun,
  complain,
  healCluster,
  insertCode,
  isChangeable,
  restartRun,
  scaleCluster,
  stopCluster,
  withImport
} from './actions';
import { Api, Cluster, Run } from './api';
import { ComparePane } from './comparePane';
import { dragCode } from './drag';
import { LogPane } from './logPane';
import { openMenu } from './menu';
import { PanelModel } from './model';
import { Actions, WorkbenchPanel } from './panel';
import { RanksPane } from './ranksPane';
import { RunPane } from './runPane';
import { RunTable } from './runTable';
import { updateStills } from './stills';
import { TimelinePane } from './timelinePane';

const ICON = new LabIcon({
  name: 'sgd-workbench:icon',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><g class="jp-icon3" fill="#616161">
    <circle cx="4.5" cy="5" r="2.5"/><circle cx="4.5" cy="12" r="2.5"/><circle cx="4.5" cy="19" r="2.5"/>
    <path d="M9 4.2c6 .6 4.2 13 13 13.600v1.700c-11 0-8-13-13-13.600zM9 11.200h3.300v1.700H9zM9 18.200h6v1.700H9z"/></g></svg>`
});

/** A widget of the main area, with what opens it again after a reload. */
type Pane = Widget & { args?: { kind: string; name: string } };

namespace CommandIDs {
  export const clusters = 'workbench:show-clusters';
  export const runs = 'workbench:show-runs';
  export const table = 'workbench:run-table';
  export const insert = 'workbench:insert-cluster';
  export const open = 'workbench:open';
  export const ranks = 'workbench:ranks';
  export const compare = 'workbench:compare';
  export const compareWith = 'workbench:compare-with';
  export const restart = 'workbench:restart-run';
  export const branch = 'workbench:branch-run';
  export const scale = 'workbench:scale-cluster';
  export const heal = 'workbench:heal-cluster';
}

/** A closed widget is only detached, and the tracker would return it in place of a new one. */
function disposeOnClose(pane: IMessageHandler, message: Message): boolean {
  if (message.type !== 'close-request') {
    return true;
  }
  (pane as Pane).dispose();
  return false;
}

const MAX_OTHERS = 10; // runs that a menu offers to compare with
const OPEN_LABELS: Record<string, string> = { run: 'Curves', timeline: 'Timeline' };

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'sgd-workbench:plugin',
  description: 'Clusters, runs and live curves of sgd-workbench.',
  autoStart: true,
  optional: [INotebookTracker, ICommandPalette, ILayoutRestorer, IStateDB],
  activate: (
    app: JupyterFrontEnd,
    notebooks: INotebookTracker | null,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null,
    state: IStateDB | null
  ) => {
    const { commands, shell } = app;
    const api = new Api(app.serviceManager.serverSettings);
    const model = new PanelModel(api);
    const actions: Actions = {
      insert: code => void insertCode(app, notebooks, code),
      openRun: name => void open('run', name),
      openTable: () => void open('table', ''),
      openLog: id => void open('log', id),
      stopCluster: cluster => void stopCluster(api, cluster).then(() => model.refresh()),
      clusterMenu: (cluster, below) => {
        const { id } = cluster;
        openMenu(commands, below, [
          { command: CommandIDs.ranks, args: { kind: 'clusters', name: id } },
          ...(isChangeable(cluster) ? [CommandIDs.scale, CommandIDs.heal].map(command => ({ command, args: { id } })) : [])
        ]);
      },
      runMenu: (run, below) => {
        const { run: name, folder, runtime } = run;
        const trains = ['mpi', 'torch'].includes(runtime ?? '');
        const others = (model.runs ?? []).filter(one => one.run !== name && one.problem === run.problem).slice(0, MAX_OTHERS);
        openMenu(commands, below, [
          { command: CommandIDs.open, args: { kind: 'run', name } },
          { command: CommandIDs.ranks, args: { kind: 'runs', name } },
          { command: CommandIDs.open, args: { kind: 'timeline', name } },
          {
            label: 'Compare with',
            items: [
              ...others.map(one => ({
                command: CommandIDs.compare,
                args: { names: [name, one.run], label: `${one.label} · ${one.run}` }
              })),
              { command: CommandIDs.compareWith, args: { folder } }
            ]
          },
          ...(trains ? [CommandIDs.restart, CommandIDs.branch].map(command => ({ command, args: { name } })) : [])
        ]);
      },
      drag: (event, label, code) =>
        dragCode(event, label, () => withImport(notebooks?.currentWidget ?? null, code))
    };
    const panel = new WorkbenchPanel(model, ICON, actions);
    shell.add(panel, 'left', { rank: 350 });

    const tracker = new WidgetTracker<Pane>({ namespace: 'sgd-workbench' });
    // Notebook 7 has one widget in its main area, the notebook.
    const area = app.name === 'JupyterLab' ? 'main' : 'right';
    const makers: Record<string, (name: string) => Pane> = {
      run: name => new RunPane(name, api, model, actions.runMenu, () => void open('timeline', name), ICON),
      timeline: name => new TimelinePane(name, api, ICON),
      log: name => new LogPane(name, api, ICON),
      'ranks-runs': name => new RanksPane('runs', name, api, ICON),
      'ranks-clusters': name => new RanksPane('clusters', name, api, ICON),
      compare: name => new ComparePane(JSON.parse(name), api, actions.openRun, ICON),
      table: () => new RunTable(api, actions.openRun, compare, state, ICON)
    };
    const compare = (names: string[]) => void open('compare', JSON.stringify(names));
    const open = (kind: string, name: string) => {
      const id = `workbench-${kind}-${name}`;
      let pane = tracker.find(one => one.id === id);
      if (!pane) {
        pane = makers[kind](name);
        pane.id = id;
        pane.args = { kind, name };
        MessageLoop.installMessageHook(pane, disposeOnClose);
        const other = tracker.find(one => one.isAttached);
        const notebook = notebooks?.currentWidget === shell.currentWidget ? shell.currentWidget : null;
        const place: DocumentRegistry.IOpenOptions = other
          ? { mode: 'tab-after', ref: other.id }
          : notebook
            ? { mode: 'split-right', ref: notebook.id }
            : {};
        shell.add(pane, area, area === 'main' ? place : {});
        void tracker.add(pane);
      }
      shell.activateById(id);
      return pane;
    };
    const reveal = (index: number) => {
      shell.activateById(panel.id);
      panel.expandSection(index);
    };

    commands.addCommand(CommandIDs.clusters, { label: 'Show Clusters', execute: () => reveal(0) });
    commands.addCommand(CommandIDs.runs, { label: 'Show Runs', execute: () => reveal(1) });
    commands.addCommand(CommandIDs.table, { label: 'Run Table', execute: () => open('table', '') });
    commands.addCommand(CommandIDs.insert, {
      label: 'Insert Cluster',
      execute: () => actions.insert('cluster = wb.Cluster(4)')
    });
    commands.addCommand(CommandIDs.open, {
      label: args => OPEN_LABELS[String(args.kind)] ?? 'Open a Run, the Run Table or Logs',
      execute: args => (String(args.kind) in makers ? open(String(args.kind), String(args.name)) : undefined)
    });
    commands.addCommand(CommandIDs.ranks, {
      label: 'Ranks',
      execute: args => open(`ranks-${args.kind === 'clusters' ? 'clusters' : 'runs'}`, String(args.name))
    });
    commands.addCommand(CommandIDs.compare, {
      label: args => String(args.label ?? 'Compare Runs'),
      execute: args => compare(args.names as string[])
    });
    commands.addCommand(CommandIDs.compareWith, {
      label: 'Others, in the Run Table…',
      execute: args => (open('table', '') as RunTable).add(String(args.folder))
    });
    const insert = (code: string, path?: string) => insertCode(app, notebooks, code, path);
    const ofRun = (id: string, label: string, act: (run: Run) => Promise<void>) =>
      commands.addCommand(id, {
        label,
        execute: async args => {
          try {
            await act((await api.run(String(args.name))).run);
          } catch (error) {
            complain(error);
          }
        }
      });
    ofRun(CommandIDs.restart, 'Restart (Insert Code)', run => restartRun(api, run, insert));
    ofRun(CommandIDs.branch, 'Branch from a Checkpoint…', run => branchRun(api, run, insert));
    const ofCluster = (id: string, label: string, act: (cluster: Cluster) => Promise<void>) =>
      commands.addCommand(id, {
        label,
        execute: async args => {
          const cluster = model.clusters?.find(one => one.id === args.id);
          try {
            await (cluster && act(cluster));
          } catch (error) {
            complain(error);
          }
          model.refresh();
        }
      });
    ofCluster(CommandIDs.scale, 'Scale…', cluster => scaleCluster(api, cluster, insert));
    ofCluster(CommandIDs.heal, 'Heal', cluster => healCluster(api, cluster, insert));
    for (const command of [CommandIDs.clusters, CommandIDs.runs, CommandIDs.table, CommandIDs.insert]) {
      palette?.addItem({ command, category: 'Workbench' });
    }

    updateStills(api);
    if (restorer) {
      restorer.add(panel, panel.id);
      void restorer.restore(tracker, {
        command: CommandIDs.open,
        name: pane => pane.id,
        args: pane => pane.args ?? {}
      });
    }
  }
};

export default plugin;
