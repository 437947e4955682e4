// A menu that a button opens, with commands of the application.

import { CommandRegistry } from '@lumino/commands';
import { Menu } from '@lumino/widgets';

export type Item = { command: string; args?: Record<string, any> } | { label: string; items: Item[] };

function menuOf(commands: CommandRegistry, items: Item[], label = ''): Menu {
  const menu = new Menu({ commands });
  menu.title.label = label;
  for (const item of items) {
    menu.addItem('items' in item ? { type: 'submenu', submenu: menuOf(commands, item.items, item.label) } : item);
  }
  return menu;
}

/** Open a menu below an element. */
export function openMenu(commands: CommandRegistry, below: Element, items: Item[]): void {
  const menu = menuOf(commands, items);
  const box = below.getBoundingClientRect();
  // a chosen item runs after the menu has closed
  menu.aboutToClose.connect(() => requestAnimationFrame(() => menu.dispose()));
  menu.open(box.left, box.bottom);
}
