package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

// verifyWait bounds each question to a plugin.
const verifyWait = 5 * time.Second

// verification runs the checks of one plugin in order; each needs those before it.
type verification struct {
	binary *host.Binary
	config json.RawMessage
	proc   *host.Process
	region *host.Region
	info   connector.Info
	checks []check
}

func (f *pluginsFlags) verify(cmd *cobra.Command, name string) error {
	if err := checkFormat(f.format); err != nil {
		return err
	}
	config, err := readObject(f.config)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	b, err := f.find(cmd, name)
	if err != nil {
		return fail(err)
	}
	tmp, err := os.MkdirTemp("", "kvport-verify-")
	if err != nil {
		return fail(err)
	}
	quoted, err := json.Marshal(tmp)
	if err != nil {
		return fail(errors.Join(err, os.RemoveAll(tmp)))
	}
	config = bytes.ReplaceAll(config, []byte("${TMP}"), bytes.Trim(quoted, `"`))
	checks := verifyPlugin(cmd.Context(), b, config)
	err = errors.Join(writeChecks(cmd.OutOrStdout(), f.format, checks), os.RemoveAll(tmp))
	if err == nil && failed(checks) > 0 {
		err = errSilent
	}
	return fail(err)
}

// verifyPlugin starts a plugin, talks to both its sides and ends it. The last check is the first that
// fails.
func verifyPlugin(ctx context.Context, b *host.Binary, config json.RawMessage) []check {
	v := &verification{binary: b, config: config}
	defer v.cleanup()
	for _, step := range []struct {
		name string
		run  func(context.Context) (string, error)
		mend string
	}{
		{"sha256", v.hash, "make the binary readable"},
		{"manifest", v.manifest, "see docs/spec for what --manifest prints"},
		{"handshake", v.handshake, "run the binary by hand to see what it prints; its main function is sdk.Serve"},
		{"heartbeat", v.heartbeat, "the plugin hangs"},
		{"describe", v.describe, "give its kv_connector_extra_config as --config; plugins describe NAME lists the fields"},
		{"worker side", v.worker, "the plugin must open with the config and map the region it is given"},
		{"scheduler side", v.scheduler, "the plugin must open with the config"},
		{"clean exit", v.exit, "Close of both sides must return, and the process end with code 0"},
	} {
		limited, cancel := context.WithTimeout(ctx, verifyWait)
		detail, err := step.run(limited)
		cancel()
		if err != nil {
			v.checks = append(v.checks, check{step.name, statusFail, err.Error(), step.mend})
			return v.checks
		}
		v.checks = append(v.checks, check{Check: step.name, Status: statusOK, Detail: detail})
	}
	return v.checks
}

func (v *verification) hash(context.Context) (string, error) { return fileHash(v.binary.Path) }

func (v *verification) manifest(context.Context) (string, error) {
	m := &v.binary.Manifest
	return fmt.Sprintf("%s version %q, protocol versions %s, at %s", strings.Join(append([]string{m.Name}, m.Aliases...), ", "),
		m.Version, numbers(m.ProtocolVersions), v.binary.Path), nil
}

// verifyBlocks is how many blocks the cache of the check has.
const verifyBlocks = 4

func (v *verification) layout() (connector.Layout, int64) {
	l := connector.Layout{
		Name: "kvport", Blocks: verifyBlocks,
		Groups:   []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{{BlockStride: 1024, Bytes: 1024}},
	}
	if len(v.info.Layouts) > 0 {
		l.Name = v.info.Layouts[0]
	}
	return host.WithDigests(l)
}

func (v *verification) handshake(ctx context.Context) (string, error) {
	_, size := v.layout()
	var err error
	if v.region, err = host.NewRegion(size); err != nil {
		return "", err
	}
	began := time.Now()
	v.proc, err = host.Launch(ctx, v.binary.Path, host.LaunchOptions{
		Regions: []*host.Region{v.region}, Environment: v.binary.Manifest.Environment,
	})
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("started and answered in %s, mutual TLS on a private socket", time.Since(began).Round(time.Millisecond)), nil
}

func (v *verification) heartbeat(ctx context.Context) (string, error) {
	began := time.Now()
	if err := v.proc.Heartbeat(ctx); err != nil {
		return "", err
	}
	return "answered in " + time.Since(began).Round(time.Microsecond).String(), nil
}

func (v *verification) describe(ctx context.Context) (string, error) {
	info, err := v.proc.Describe(ctx, v.config)
	if err != nil {
		return "", fmt.Errorf("with the config %s: %w", v.config, err)
	}
	m := &v.binary.Manifest
	if info.Name != m.Name {
		return "", fmt.Errorf("it calls itself %q here and %q in its manifest", info.Name, m.Name)
	}
	for _, name := range info.Capabilities.Names() {
		if !slices.Contains(m.Capabilities, name) {
			return "", fmt.Errorf("it has %s with this config, which its manifest does not announce", name)
		}
	}
	v.info = info
	detail := "scope " + info.Scope.String() + ", capabilities "
	if info.Capabilities == 0 {
		return detail + "none", nil
	}
	return detail + info.Capabilities.String(), nil
}

func (v *verification) env() connector.Env {
	layout, _ := v.layout()
	key := make(connector.Secret, 32) // nobody else has it, so nobody can connect
	_, _ = rand.Read(key)             // never fails
	return connector.Env{
		Engine: "kvport-verify", Epoch: uint64(time.Now().UnixNano()), Role: connector.RoleBoth, World: 1,
		Model: connector.NewFingerprint("kvport verify"), Shape: connector.NewFingerprint("kvport verify"), Layout: layout,
		LinkKey: key, RouterKey: key,
	}
}

func (v *verification) worker(ctx context.Context) (string, error) {
	w, err := v.proc.OpenWorker(ctx, v.env(), v.config)
	if err != nil {
		return "", err
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", v.proc.PID()))
	if err != nil {
		return "", errors.Join(err, w.Close())
	}
	detail := "opened; the cache region was passed and is mapped"
	if !bytes.Contains(maps, []byte("memfd:kvport-cache")) {
		detail = "opened; the cache region was passed, the plugin has not mapped it yet"
	}
	return detail, w.Close()
}

func (v *verification) scheduler(ctx context.Context) (string, error) {
	s, err := v.proc.OpenScheduler(ctx, v.env(), v.config)
	if err != nil {
		return "", err
	}
	space := connector.KeySpace{Salt: "kvport verify"}
	matches, err := s.Match(ctx, []connector.Query{{Tokens: 17, Keys: space.Keys(make([]int32, 16), 16)}})
	if err = errors.Join(err, s.Close()); err != nil {
		return "", err
	}
	if matches[0].Tokens != 0 {
		return "", fmt.Errorf("it claims %d tokens that nobody stored", matches[0].Tokens)
	}
	return "opened; an unknown prompt is a miss", nil
}

func (v *verification) exit(ctx context.Context) (string, error) {
	p := v.proc
	v.proc = nil
	if err := p.Close(ctx); err != nil {
		return "", err
	}
	if n := p.Violations(); n > 0 {
		return "", fmt.Errorf("%d of its answers broke the protocol", n)
	}
	return "ended with code 0, nothing is left of it", nil
}

func (v *verification) cleanup() {
	if v.proc != nil {
		v.proc.Kill()
	}
	if v.region != nil {
		_ = v.region.Close() // what could go wrong does not concern the plugin
	}
}
