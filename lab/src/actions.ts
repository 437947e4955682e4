// What buttons and commands do: code into a notebook, commands to runs and clusters.

import { JupyterFrontEnd } from '@jupyterlab/application';
import { Clipboard, Dialog, InputDialog, Notification, showDialog } from '@jupyterlab/apputils';
import { INotebookTracker, NotebookActions, NotebookPanel } from '@jupyterlab/notebook';

import { Api, Cluster, Run } from './api';
import { count, plural } from './format';

export const IMPORT = 'import workbench as wb';

/** Show an error of an action, which has no caller. */
export function complain(error: unknown): void {
  Notification.error(error instanceof Error ? error.message : String(error), { autoClose: 8000 });
}

/**
 * Put code into a new cell below the active one of a notebook, and do not run it. Without a notebook, make one; where
 * that opens another page (Notebook 7), copy the code instead.
 *
 * path: of the notebook; by default the current one.
 */
export async function insertCode(
  app: JupyterFrontEnd,
  tracker: INotebookTracker | null,
  code: string,
  path?: string
): Promise<void> {
  let panel: NotebookPanel | null = tracker?.currentWidget ?? null;
  if (path !== undefined && panel?.context.path !== path) {
    panel = tracker?.find(one => one.context.path === path) ?? null;
    panel ??= (await app.commands.execute('docmanager:open', { path }).catch(() => null)) ?? null;
  } else if (!panel) {
    await app.serviceManager.kernelspecs.ready;
    const specs = app.serviceManager.kernelspecs.specs;
    const kernelName = specs?.kernelspecs['workbench'] ? 'workbench' : specs?.default;
    const made = await app.commands.execute('notebook:create-new', { kernelName }).catch(() => null);
    panel = made?.content && made?.context ? made : null;
  }
  if (!panel) {
    Clipboard.copyToSystem(`${IMPORT}\n\n${code}`);
    Notification.info('There is no open notebook here: the code was copied, paste it into a cell', { autoClose: 5000 });
    return;
  }
  await panel.context.ready;
  await panel.revealed;
  const notebook = panel.content;
  const text = withImport(panel, code);
  const active = notebook.activeCell?.model;
  if (!active || active.type !== 'code' || active.sharedModel.getSource().trim()) {
    NotebookActions.insertBelow(notebook);
  }
  notebook.activeCell?.model.sharedModel.setSource(text);
  app.shell.activateById(panel.id);
  notebook.mode = 'edit';
}

/** The code, with the import before it if the notebook has none. */
export function withImport(panel: NotebookPanel | null, code: string): string {
  const cells = panel?.content.widgets ?? [];
  const imported = cells.some(cell => /\bworkbench as wb\b/.test(cell.model.sharedModel.getSource()));
  return imported || code.includes(IMPORT) ? code : `${IMPORT}\n\n${code}`;
}

/** What inserts code: into the current notebook, or into that with this path. */
export type Insert = (code: string, path?: string) => Promise<void>;

/** Whether a cluster can be changed from here: by its notebook's kernel, or by the server if it is detached. */
export function isChangeable(cluster: Cluster): boolean {
  return cluster.notebook !== null || cluster.attach !== null;
}

/** Ask for a number of ranks, then scale the cluster: the server if it is detached, else by code for its notebook. */
export async function scaleCluster(api: Api, cluster: Cluster, insert: Insert): Promise<void> {
  const how = cluster.notebook
    ? `${cluster.notebook} owns it, so the code goes into that notebook, and you run it.`
    : 'It is detached, so this needs no notebook.';
  const { value, button } = await InputDialog.getNumber({
    title: `Scale ${cluster.id}`,
    label: `Number of ranks. ${lost(cluster)} ${how}`,
    value: cluster.num_ranks ?? 2,
    okLabel: cluster.notebook ? 'Insert code' : 'Restart with these ranks'
  });
  if (!button.accept || value === null || value === cluster.num_ranks) {
    return;
  }
  if (!Number.isInteger(value) || value < 1) {
    throw new Error(`${value} ranks: give a whole number above 0`);
  }
  if (cluster.notebook) {
    return insert(`cluster.scale(${value})  # ${cluster.id}`, cluster.notebook);
  }
  return work(`Scaling ${cluster.id} to ${plural(value, 'rank')}`, api.changeCluster(cluster.id, `scale?ranks=${value}`));
}

/** Restart the ranks of a cluster if some have ended: as in `scaleCluster`. */
export async function healCluster(api: Api, cluster: Cluster, insert: Insert): Promise<void> {
  if (cluster.notebook) {
    return insert(`cluster.heal()  # ${cluster.id}`, cluster.notebook);
  }
  return work(`Healing ${cluster.id}`, api.changeCluster(cluster.id, 'heal'));
}

function lost(cluster: Cluster): string {
  const training = cluster.run && ['running', 'paused', 'starting'].includes(cluster.run_status ?? '');
  return `All its ranks restart, and the contents of their memory are lost.${training ? ` The training ${cluster.run} fails.` : ''}`;
}

/** Show that something is under way, then how it ended. */
async function work(what: string, answer: Promise<{ message: string }>): Promise<void> {
  const id = Notification.emit(what, 'in-progress', { autoClose: false });
  try {
    Notification.update({ id, message: (await answer).message, type: 'success', autoClose: 3000 });
  } catch (error) {
    Notification.update({ id, message: String((error as Error).message), type: 'error', autoClose: 8000 });
  }
}

/** Insert code that trains again with the settings of a run. */
export async function restartRun(api: Api, run: Run, insert: Insert): Promise<void> {
  const code = await api.code(run.run);
  if (!code.repeat) {
    throw new Error(`${run.run} is ${run.runtime === 'simulated' ? 'simulated' : 'your own loop'}: run its code again`);
  }
  return insert(code.repeat);
}

/** Ask for a checkpoint, then insert code that trains on from it as another run. */
export async function branchRun(api: Api, run: Run, insert: Insert): Promise<void> {
  const steps = await api.checkpoints(run.run);
  if (!steps.length) {
    throw new Error(`${run.run} has no checkpoint: stop it with the button, or train with checkpoint_every=`);
  }
  const items = steps.map(number => `after ${count(number)} steps`);
  const { value, button } = await InputDialog.getItem({
    title: `Branch ${run.label}`,
    label: 'Checkpoint from which another run continues. The code is inserted: change its settings, and run it.',
    items,
    current: 0,
    okLabel: 'Insert code'
  });
  if (button.accept && value !== null) {
    const code = await api.code(run.run, steps[items.indexOf(value)]);
    await insert(code.branch);
  }
}

/** Ask, then stop a cluster. */
export async function stopCluster(api: Api, cluster: Cluster): Promise<void> {
  const training = cluster.run && ['running', 'paused', 'starting'].includes(cluster.run_status ?? '');
  const sentences = [
    `Its ${cluster.num_ranks ?? ''} ranks end, and the contents of their memory are lost.`,
    cluster.owned ? `It is ${cluster.state}.` : '',
    training ? `The training ${cluster.run} fails. Stop the run first to keep a checkpoint.` : ''
  ];
  const { button } = await showDialog({
    title: `Stop ${cluster.id}?`,
    body: sentences.filter(Boolean).join(' '),
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: 'Stop cluster' })],
    defaultButton: 0
  });
  if (!button.accept) {
    return;
  }
  await work(`Stopping ${cluster.id}`, api.stopCluster(cluster.id));
}
