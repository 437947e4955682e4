// What buttons and commands do: code into a notebook, commands to runs and clusters.

import { JupyterFrontEnd } from '@jupyterlab/application';
import { Clipboard, Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { INotebookTracker, NotebookActions, NotebookPanel } from '@jupyterlab/notebook';

import { Api, Cluster } from './api';

export const IMPORT = 'import workbench as wb';

/** Show an error of an action, which has no caller. */
export function complain(error: unknown): void {
  Notification.error(error instanceof Error ? error.message : String(error), { autoClose: 8000 });
}

/**
 * Put code into a new cell below the active one of the current notebook, and do not run it. Without a notebook, make
 * one; where that opens another page (Notebook 7), copy the code instead.
 */
export async function insertCode(app: JupyterFrontEnd, tracker: INotebookTracker | null, code: string): Promise<void> {
  let panel: NotebookPanel | null = tracker?.currentWidget ?? null;
  if (!panel) {
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
  const imported = notebook.widgets.some(cell => /\bworkbench as wb\b/.test(cell.model.sharedModel.getSource()));
  const text = imported || code.includes(IMPORT) ? code : `${IMPORT}\n\n${code}`;
  const active = notebook.activeCell?.model;
  if (!active || active.type !== 'code' || active.sharedModel.getSource().trim()) {
    NotebookActions.insertBelow(notebook);
  }
  notebook.activeCell?.model.sharedModel.setSource(text);
  app.shell.activateById(panel.id);
  notebook.mode = 'edit';
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
  const working = Notification.emit(`Stopping ${cluster.id}`, 'in-progress', { autoClose: false });
  try {
    const { message } = await api.stopCluster(cluster.id);
    Notification.update({ id: working, message, type: 'success', autoClose: 3000 });
  } catch (error) {
    Notification.update({ id: working, message: String((error as Error).message), type: 'error', autoClose: 8000 });
  }
}
