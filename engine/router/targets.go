package router

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
)

// targetsAtOnce is how many targets of SRV records are looked up at once.
const targetsAtOnce = 16

// hosts finds the addresses and ports of a name.
func (l *lookups) hosts(ctx context.Context, n dnsName) (hosts []string, err error) {
	if !n.srv {
		return l.addresses(ctx, n.host, n.port)
	}
	_, records, err := l.config.Resolver.LookupSRV(ctx, "", "", n.host)
	if err != nil {
		return nil, err
	}
	records = slices.DeleteFunc(records, func(r *net.SRV) bool { return r.Port == 0 || !isName(strings.TrimSuffix(r.Target, ".")) })
	if err := notTooMany(len(records)); err != nil {
		return nil, err
	}
	// The targets are known to the server that knows the name, and maybe to no other.
	found := make([][]string, len(records))
	var tasks errgroup.Group
	tasks.SetLimit(targetsAtOnce)
	for i, r := range records {
		tasks.Go(func() error {
			list, err := l.addresses(ctx, r.Target, r.Port)
			if missing, is := errors.AsType[*net.DNSError](err); is && missing.IsNotFound {
				return nil // it has just left
			}
			found[i] = list
			return err
		})
	}
	if err := tasks.Wait(); err != nil {
		return nil, err
	}
	return slices.Concat(found...), nil
}

// addresses finds the addresses of a host.
func (l *lookups) addresses(ctx context.Context, host string, port uint16) (list []string, err error) {
	addresses, err := l.config.Resolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	for _, a := range oneFamily(addresses) {
		list = append(list, netip.AddrPortFrom(a, port).String())
	}
	return list, nil
}
