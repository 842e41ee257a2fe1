package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/sandbox"
	"github.com/kvport/kvport/multiconnector"
)

// Inspect finds the plugin that cfg names and asks it what it would do with its config. It refuses what Open
// would refuse whatever the engine is, memory that the machine does not have included. Nothing is
// opened and nothing is left behind. What a changed config or binary would cure wraps ErrConfig and
// names the field.
func Inspect(ctx context.Context, cfg *Config, opts Options) (connector.Info, error) {
	var none connector.Info
	if _, err := cfg.Settings.TenantSecret(); err != nil {
		return none, err
	}
	keys, err := cfg.Settings.keys(nil)
	if err != nil {
		return none, err
	}
	info, err := inspect(ctx, cfg, opts, &promised{})
	if err != nil {
		return info, err
	}
	if err := cmp.Or(cfg.Settings.CheckShared(&info), cfg.checkOwnKey(keys, &info)); err != nil {
		return info, err
	}
	warnOwnKey(opts.Log, keys)
	return info, nil
}

func inspect(ctx context.Context, cfg *Config, opts Options, memory *promised) (connector.Info, error) {
	var none connector.Info
	if len(cfg.Children) > 0 {
		return inspectChildren(ctx, cfg, opts, memory)
	}
	box, err := cfg.box(sandbox.Probe())
	if err != nil {
		return none, err
	}
	prog, manifest, err := resolve(ctx, cfg, opts.PluginPath, &box)
	if err != nil {
		return none, err
	}
	cfg.adopt(manifest, opts.Log)
	env, _ := cfg.environment(manifest, &box)
	d := &cfg.Settings.Deadlines
	proc, err := launch(ctx, prog, LaunchOptions{
		Log: opts.Log, Environment: env, Handshake: d.Handshake, Heartbeat: cfg.Settings.Heartbeat, NoRing: true,
		Sandbox: cfg.confine(&box, env, manifest.Needs),
	})
	if err != nil {
		return none, errors.Join(err, prog.Close())
	}
	ctx, cancel := plugin.Patient(ctx, d.Handshake, proc.Waits())
	defer cancel()
	info, err := proc.Describe(ctx, cfg.Extra)
	switch {
	case plugin.Silent(err):
		if plugin.RanOut(ctx) {
			err = plugin.Longer(err, d.Handshake)
		}
		err = fmt.Errorf("%w: plugin %s: %w", ErrConfig, proc.Path(), proc.Blame(err))
	case err != nil:
		err = fmt.Errorf("%w: kv_connector_extra_config: %w", ErrConfig, err)
	default:
		if err = accepts(cfg, &info); err == nil {
			// The size of the engine's blocks is not known: this is the least that the connector asks for.
			_, err = memory.take(&cfg.Settings, &info, info.ArenaSize(&connector.Layout{}, 1))
		}
	}
	proc.Kill()
	return info, errors.Join(err, prog.Close())
}

// inspectChildren asks every child of a MultiConnector and combines the answers.
func inspectChildren(ctx context.Context, cfg *Config, opts Options, memory *promised) (connector.Info, error) {
	infos := make([]connector.Info, len(cfg.Children))
	for i, c := range cfg.Children {
		var err error
		if infos[i], err = inspect(ctx, c, opts, memory); err != nil {
			return connector.Info{}, under(fmt.Sprintf("kv_connector_extra_config.connectors[%d]", i), err)
		}
	}
	info, err := multiconnector.Fold(MultiName, childrenOf(cfg, infos))
	if err != nil {
		return info, fmt.Errorf("%w: kv_connector_extra_config.connectors: %w", ErrConfig, err)
	}
	return info, accepts(cfg, &info)
}

// accepts checks what a connector says about itself against the settings.
func accepts(cfg *Config, info *connector.Info) error {
	switch {
	case cfg.Settings.Trust == TrustStaged && info.Capabilities&connector.CanHold != 0 && cfg.Role.Saves():
		return fmt.Errorf("%w: kvport.trust: %s keeps finished blocks in the cache for its peers, at level %q it cannot read them; use %q",
			ErrConfig, info.Name, TrustStaged, TrustInPlace)
	case info.Lossy && !cfg.Settings.AllowLossy:
		return fmt.Errorf("%w: %s may load other bytes than were saved; set kvport.allow_lossy to accept that", ErrConfig, info.Name)
	}
	return nil
}
