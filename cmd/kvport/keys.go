package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/internal/keyring"
)

// keysFlags are the flags of kvport keys.
type keysFlags struct {
	file    string
	format  string
	promote string
	drop    string
}

func newKeys() *cobra.Command {
	f := &keysFlags{}
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "Make, list and replace the keys that a deployment shares, and those of clients",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	for _, sub := range []*cobra.Command{f.newInit(), f.newList(), f.newRotate()} {
		sub.Args = cobra.NoArgs
		sub.Flags().StringVar(&f.file, "file", "", "file of keys, as kvport.ticket_key_file names it; default: the one that this user's engines on this machine share")
		sub.Flags().StringVar(&f.format, "format", "text", "text or json")
		cmd.AddCommand(sub)
	}
	cmd.AddCommand(newAPIKeys())
	return cmd
}

func (f *keysFlags) newInit() *cobra.Command {
	return &cobra.Command{
		Use:   "init",
		Short: "Make a file with one new key; a file that is there is never overwritten",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkFormat(f.format); err != nil {
				return err
			}
			ring := keyring.New(time.Now())
			path, err := f.create(ring)
			if errors.Is(err, fs.ErrExist) {
				return fail(fmt.Errorf("%s is there already; kvport keys rotate replaces its key", path))
			}
			if err != nil {
				return fail(err)
			}
			return fail(f.write(cmd.OutOrStdout(), path, ring))
		},
	}
}

func (f *keysFlags) newList() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the ids of the keys, which say nothing of the keys, and which one signs",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkFormat(f.format); err != nil {
				return err
			}
			path, err := f.path()
			if err != nil {
				return fail(err)
			}
			ring, err := keyring.Load(path)
			if err != nil {
				return fail(err)
			}
			return fail(f.write(cmd.OutOrStdout(), path, ring))
		},
	}
}

func (f *keysFlags) newRotate() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Add a new key that all engines read; then --promote it; then --drop the old one",
		Long: "Add a new key at the end of the ring: engines accept it within seconds, and none signs with it yet.\n" +
			"When the file is on all machines, --promote ID makes it the one that signs. When that is on all machines, every plugin\n" +
			"has been started again and no ticket of the old key is left, --drop ID removes the old one. When that is on all machines,\n" +
			"start every plugin again: a plugin keeps the keys of its start, and only then is the old key out of use.\n" +
			"Copy the file under another name and rename it.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkFormat(f.format); err != nil {
				return err
			}
			flags := cmd.Flags()
			if flags.Changed("promote") && flags.Changed("drop") {
				return errors.New("--promote and --drop are two steps: between them the file goes to all machines")
			}
			for name, id := range map[string]string{"promote": f.promote, "drop": f.drop} {
				if flags.Changed(name) && id == "" {
					return fmt.Errorf("--%s is empty, want the id of a key, see kvport keys list", name)
				}
			}
			path, err := f.path()
			if err != nil {
				return fail(err)
			}
			ring, err := keyring.Change(path, f.step)
			if err != nil {
				return fail(err)
			}
			return fail(f.write(cmd.OutOrStdout(), path, ring))
		},
	}
	cmd.Flags().StringVar(&f.promote, "promote", "", "id of the key that signs from now on")
	cmd.Flags().StringVar(&f.drop, "drop", "", "id of a key that is removed")
	return cmd
}

// step is one of the three steps of a rotation.
func (f *keysFlags) step(ring *keyring.Ring) (*keyring.Ring, error) {
	switch {
	case f.promote != "":
		return ring.Promote(f.promote)
	case f.drop != "":
		return ring.Drop(f.drop)
	}
	return ring.Rotate(time.Now())
}

// create makes the file that the command is about.
func (f *keysFlags) create(ring *keyring.Ring) (path string, err error) {
	if f.file != "" {
		return f.file, keyring.Create(f.file, ring)
	}
	return keyring.CreateShared(ring)
}

// path is the file that the command is about.
func (f *keysFlags) path() (string, error) {
	if f.file != "" {
		return f.file, nil
	}
	return keyring.SharedPath()
}

// keyLine is what is said of one key.
type keyLine struct {
	File  string `json:"file"`
	ID    string `json:"id"`
	Signs bool   `json:"signs"`           // the others are only read
	Added string `json:"added,omitempty"` // empty: not known
}

// write says what is in a ring.
func (f *keysFlags) write(w io.Writer, path string, ring *keyring.Ring) error {
	lines := make([]keyLine, len(ring.Keys))
	for i, k := range ring.Keys {
		lines[i] = keyLine{File: path, ID: k.ID, Signs: i == 0}
		if !k.Added.IsZero() {
			lines[i].Added = k.Added.Format(time.RFC3339)
		}
	}
	if f.format == "json" {
		return writeJSONLines(w, lines)
	}
	for _, l := range lines {
		does, age := "reads", "age not known"
		if l.Signs {
			does = "signs"
		}
		if l.Added != "" {
			age = "added " + l.Added
		}
		if _, err := fmt.Fprintf(w, "%s  %s  %s\n", l.ID, does, age); err != nil {
			return err
		}
	}
	return nil
}
