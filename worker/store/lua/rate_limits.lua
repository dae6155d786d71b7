-- Free the slots of cancelled and deleted jobs in one rate limit, and forget the limit if it is empty.
local key = args.key
local limit = 'rq:rl:' .. key

local function needs_slot(id)
  local status = call('HGET', 'rq:job:' .. id, 'status')
  return status == 'queued' or status == 'started'
    or call('ZCOUNT', 'rq:executions:' .. id, '(' .. args.now_ts, '+inf') > 0
end

for _, id in ipairs(call('ZRANGE', limit .. ':allowed', 0, -1)) do
  local is_job, needs = tried(needs_slot, id)
  if not (is_job and needs) then call('ZREM', limit .. ':allowed', id) end
end
let_in(key, args.now_iso)
if call('EXISTS', limit .. ':allowed', limit .. ':rate_limited') == 0 then
  call('SREM', 'rq:rl-keys', key)
  call('DEL', limit)
end
return 1
