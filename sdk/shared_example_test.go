package sdk_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/sdk"
)

type config struct {
	Dir string `json:"dir" jsonschema:"required,description=Folder of the database."`
}

func plugin() connector.Plugin {
	databases := new(sdk.Shared[*database])
	open := func(ctx context.Context, env connector.Env, c config) (lookupbuffer.Buffer, error) {
		path := filepath.Join(c.Dir, "engine-"+url.PathEscape(env.Engine))
		db, release, err := databases.Open(ctx, path, func(context.Context) (*database, error) { return openDatabase(path) })
		if err != nil {
			return nil, err
		}
		return lookupbuffer.NewDatabase(db, lookupbuffer.DatabaseOptions{Keep: true, Close: release}), nil
	}
	return sdk.FromBuffer(sdk.Definition{Name: "OneFileConnector", Version: "1", Scope: connector.ScopeEngine, Needs: connector.Needs{Writes: []string{"dir"}}}, open)
}

// database is one file, which can be opened once: like those of bbolt and LevelDB it is locked. What is in it is in memory, too.
type database struct {
	file *os.File

	mu     sync.Mutex
	values map[string][]byte
}

// record is what one call has changed. Without a value the key was deleted.
type record struct {
	Key   string
	Value []byte
}

func openDatabase(path string) (*database, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("dir: %s is open already: %w", path, connector.ErrIncompatible), file.Close())
	}
	d := &database{file: file, values: map[string][]byte{}}
	records := json.NewDecoder(file)
	for {
		var r record
		if err := records.Decode(&r); err != nil { // at the end, or where a process died
			return d, file.Truncate(records.InputOffset())
		}
		d.values[r.Key] = r.Value
	}
}

func (d *database) change(r record) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err := d.file.Write(line); err != nil {
		return err
	}
	d.values[r.Key] = r.Value
	return nil
}

func (d *database) Exists(ctx context.Context, keys []string) ([]bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	there := make([]bool, len(keys))
	for i, k := range keys {
		there[i] = d.values[k] != nil
	}
	return there, ctx.Err()
}

func (d *database) Get(_ context.Context, key string) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.values[key] == nil {
		return nil, connector.ErrGone
	}
	return d.values[key], nil
}

func (d *database) Put(_ context.Context, key string, value []byte) error {
	return d.change(record{key, append([]byte{}, value...)})
}

func (d *database) Delete(_ context.Context, key string) error { return d.change(record{Key: key}) }

func (d *database) Close() error { return d.file.Close() }

// Two users of a database that can be opened once share its handle, which the last of them closes.
func ExampleShared() {
	dir, err := os.MkdirTemp("", "shared-*")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "database")
	open := func(context.Context) (*database, error) { return openDatabase(path) }
	databases := new(sdk.Shared[*database])
	one, releaseOne, err := databases.Open(context.Background(), path, open)
	if err != nil {
		fmt.Println(err)
		return
	}
	two, releaseTwo, err := databases.Open(context.Background(), path, open)
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = openDatabase(path)
	fmt.Println(one == two, errors.Is(err, connector.ErrIncompatible))
	fmt.Println(releaseOne(), releaseTwo())
	// Output:
	// true true
	// <nil> <nil>
}

// The database serves any number of lives of an engine. Without Shared the second one does not open.
func TestSharedDatabase(t *testing.T) {
	only := conformance.Options{Only: []string{"visible", "round-trip", "reopen", "many-sides"}}
	inFolder := json.RawMessage(`{"dir": "@TMP@"}`)
	for _, r := range conformance.Check(t.Context(), conformance.InProcess(plugin(), inFolder), only) {
		require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
	}
}
