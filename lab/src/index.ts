// The plugin: the side panel, the panes and the commands.

import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, WidgetTracker } from '@jupyterlab/apputils';
import { DocumentRegistry } from '@jupyterlab/docregistry';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IStateDB } from '@jupyterlab/statedb';
import { LabIcon } from '@jupyterlab/ui-components';
import { Widget } from '@lumino/widgets';

import { insertCode, stopCluster } from './actions';
import { Api } from './api';
import { LogPane } from './logPane';
import { PanelModel } from './model';
import { Actions, WorkbenchPanel } from './panel';
import { RunPane } from './runPane';
import { RunTable } from './runTable';
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
}

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
      stopCluster: cluster => void stopCluster(api, cluster).then(() => model.refresh())
    };
    const panel = new WorkbenchPanel(model, ICON, actions);
    shell.add(panel, 'left', { rank: 350 });

    const tracker = new WidgetTracker<Pane>({ namespace: 'sgd-workbench' });
    // Notebook 7 has one widget in its main area, the notebook.
    const area = app.name === 'JupyterLab' ? 'main' : 'right';
    const makers: Record<string, (name: string) => Pane> = {
      run: name => new RunPane(name, api, model, ICON, () => void open('timeline', name)),
      timeline: name => new TimelinePane(name, api, ICON),
      log: name => new LogPane(name, api, ICON),
      table: () => new RunTable(api, actions.openRun, state, ICON)
    };
    const open = (kind: string, name: string) => {
      const id = `workbench-${kind}-${name}`;
      let pane = tracker.find(one => one.id === id);
      if (!pane) {
        pane = makers[kind](name);
        pane.id = id;
        pane.args = { kind, name };
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
      label: 'Open a Run, the Run Table or Logs',
      execute: args => (String(args.kind) in makers ? open(String(args.kind), String(args.name)) : undefined)
    });
    for (const command of [CommandIDs.clusters, CommandIDs.runs, CommandIDs.table, CommandIDs.insert]) {
      palette?.addItem({ command, category: 'Workbench' });
    }

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
