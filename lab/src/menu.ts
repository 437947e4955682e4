// A menu that a button opens, with commands of the application.

import { CommandRegistry } from '@lumino/commands';
import { Menu } from '@lumino/widgets';

export interface Item {
  command: string;
  args?: Record<string, any>;
}

/** Open a menu below an element. Commands that are hidden or unknown are left out. */
export function openMenu(commands: CommandRegistry, below: Element, items: Item[]): void {
  const menu = new Menu({ commands });
  items.filter(item => commands.hasCommand(item.command)).forEach(item => menu.addItem(item));
  const box = below.getBoundingClientRect();
  // a chosen item runs after the menu has closed
  menu.aboutToClose.connect(() => requestAnimationFrame(() => menu.dispose()));
  menu.open(box.left, box.bottom);
}
