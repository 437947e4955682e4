// Drag a row of the panel into a notebook, which becomes a cell with code.

import { MimeData } from '@lumino/coreutils';
import { Drag } from '@lumino/dragdrop';

const CELLS = 'application/vnd.jupyter.cells'; // what notebooks accept
const FAR_PX = 5; // a shorter move is a click

/** Begin a drag with code when the mouse, which was pressed, moves far enough. */
export function dragCode(event: MouseEvent, label: string, code: () => string): void {
  if (event.button !== 0 || (event.target as Element).closest('button')) {
    return;
  }
  const { clientX, clientY } = event;
  const end = () => {
    document.removeEventListener('mousemove', move, true);
    document.removeEventListener('mouseup', end, true);
  };
  const move = (moved: MouseEvent) => {
    if (Math.abs(moved.clientX - clientX) < FAR_PX && Math.abs(moved.clientY - clientY) < FAR_PX) {
      return;
    }
    end();
    const mimeData = new MimeData();
    const text = code();
    mimeData.setData(CELLS, [{ cell_type: 'code', source: text, metadata: {}, outputs: [], execution_count: null }]);
    mimeData.setData('text/plain', text);
    const image = document.createElement('div');
    image.className = 'wb-Dragged';
    image.textContent = label;
    const drag = new Drag({ mimeData, dragImage: image, supportedActions: 'copy', proposedAction: 'copy' });
    void drag.start(moved.clientX, moved.clientY).then(() => drag.dispose());
  };
  event.preventDefault();
  document.addEventListener('mousemove', move, true);
  document.addEventListener('mouseup', end, true);
}
